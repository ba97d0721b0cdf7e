"""What `serve` says of the memory that it may take."""

from __future__ import annotations

from decoding.recurrent_checks import recurrent_world
from helpers.tiny import tiny_llama

from skipsearch.models import adapt
from skipsearch.serve.limits import Limits
from skipsearch.serve.memory_bounds import describe_memory


def test_the_bounds_are_those_of_the_caches() -> None:
    model = adapt(tiny_llama(context=500_000))
    slot_bytes = 2 * model.spec.n_layers * 1 * 16 * 8  # K and V, KV heads, head size, float64
    limits = Limits(max_num_seqs=3, prefix_bytes=5 * 10**9, batch_passes=True, context=500_000)
    running, batch = (3 * (2 * 500_000 + 128) * slot_bytes, 32_768 * slot_bytes)
    text = describe_memory(model, limits, draft_bytes=300_000_000)
    assert f"{running / 1e9:.1f} GB for 3 running requests of up to 500,000 tokens" in text
    assert f"{batch / 1e6:.0f} MB for their batch, 5.0 GB for finished texts" in text
    assert "of weights and 0.3 GB for drafts" in text
    assert f"{slot_bytes / 1e3:.0f} KB of K/V a token" in text
    alone = describe_memory(adapt(tiny_llama(context=1000)), Limits())
    assert "up to 1,000 tokens" in alone
    assert "batch" not in alone


def test_a_model_with_recurrent_layers_has_no_bound_by_tokens() -> None:
    text = describe_memory(recurrent_world("lfm2")[0], Limits())
    assert "of weights" in text
    assert "a token" not in text


def test_a_draft_model_has_kv_of_the_same_texts() -> None:
    model = adapt(tiny_llama(context=1000))
    alone, together = (
        describe_memory(model, Limits(), draft_models=draft_models)
        for draft_models in ([], [model])
    )
    kv = [float(text.split(" KB of K/V")[0].rsplit(" ", 1)[1]) for text in (alone, together)]
    assert kv[1] > 1.5 * kv[0]
