"""A model driven by its own forward: what it was read as, what a draft leaves out, and what it does
not take.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skipsearch as ss
from models.every_class import LAYERED, build, walk
from models.tiny import Run, some_tokens
from skipsearch.core.mask import SkipMask
from skipsearch.engine.forward import forward, run_layer_loop
from skipsearch.errors import ModelError
from skipsearch.models.generic.generic_adapter import GenericAdapter, attach_tokens, detach_tokens
from skipsearch.models.kv_cache import Planner
from skipsearch.replay.replay import Replay

LAYERS = 3


def own(family: str) -> GenericAdapter:
    adapter = ss.adapt(build(family))
    assert isinstance(adapter, GenericAdapter)
    return adapter


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("starcoder2", "by structure: layers at model.layers, attention self_attn, MLP mlp"),
        ("bloom", "by structure: layers at transformer.h, attention self_attention, MLP mlp"),
        ("biogpt", "by structure: layers at biogpt.layers, attention self_attn, MLP fc1, fc2"),
        (
            "granitemoeshared",
            "by structure: layers at model.layers, attention self_attn, MLP block_sparse_moe",
        ),
    ],
)
def test_it_says_what_it_was_read_as(family: str, said: str) -> None:
    assert own(family).description == said


@pytest.mark.parametrize(
    "family", ["starcoder2", "bloom", "biogpt", "gptj", "deepseek_v3", "mimo_v2_flash", "mpt"]
)
@torch.no_grad()
def test_a_draft_leaves_out_what_its_mask_names(family: str) -> None:
    """A layer whose attention and MLP are off leaves its input as it is, and the passes agree with
    the layer loop.
    """
    model, tokens = own(family), some_tokens(9)
    full = Run(model)(tokens)
    for mask in (
        SkipMask(LAYERS, attn=(1,)),
        SkipMask(LAYERS, mlp=(2,)),
        SkipMask(LAYERS, attn=(0, 2), mlp=(2,)),
    ):
        cache, planner = model.new_cache(1, 16), Planner(16, model.spec.device)
        plan = planner.plan_chain(0, 9)
        whole = forward(model, tokens, cache, plan, mask)
        torch.testing.assert_close(
            whole, run_layer_loop(model, tokens, cache, plan, mask), rtol=1e-6, atol=1e-6
        )
        assert (whole[0] - full).abs().max() > 1e-3
    h, cache = model.embed(tokens, plan.positions), model.new_cache(1, 16)
    torch.testing.assert_close(model.block(0, h, cache, plan, attn=False, mlp=False), h)
    assert cache.keys[0] is None
    assert (
        forward(
            model, tokens, model.new_cache(1, 16), plan, SkipMask.from_layers(LAYERS, range(LAYERS))
        )
        .isfinite()
        .all()
    )


@torch.no_grad()
def test_it_costs_no_attention_that_is_off() -> None:
    model, tokens = own("starcoder2"), some_tokens(9)
    cache = model.new_cache(1, 16)
    forward(
        model,
        tokens,
        cache,
        Planner(16, model.spec.device).plan_chain(0, 9),
        SkipMask(LAYERS, attn=(0, 2)),
    )
    assert [keys is not None for keys in cache.keys] == [False, True, False]


def test_a_fused_engine_and_trained_drafts_need_a_row() -> None:
    from skipsearch.engine.on_same_engine import base_adapter

    with pytest.raises(
        ModelError, match=r"needs a family of the table.* is a arcee model driven by hf"
    ):
        base_adapter(own("arcee"))


@torch.no_grad()
def test_texts_of_several_lengths_are_refused_where_one_bias_serves_a_batch() -> None:
    model = own("mpt")
    assert (model.spec.ragged_batches, own("bloom").spec.ragged_batches) == (False, True)
    cache, planner = model.new_cache(2, 16), Planner(16, model.spec.device)
    tokens = some_tokens(6).repeat(2, 1)
    forward(model, tokens, cache, planner.plan_chain(0, 6, batch_size=2))
    positions = torch.tensor([[3, 4], [4, 5]])
    plan = planner.plan_replay(6, positions, positions, torch.tensor([0, 1]))
    with pytest.raises(ModelError, match="take one bias for all rows of a batch"):
        forward(model, tokens[:, :2], cache, plan)


DENSE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    "changes",
    [DENSE, DENSE | EXPERTS, {"num_kv_shared_layers": 0}, {}],
    ids=["dense", "experts", "embeddings of each layer", "shared K/V too"],
)
def test_every_form_of_gemma_4_is_exact(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYERED, "gemma4_text", LAYERED["gemma4_text"] | changes)
    walked = walk("gemma4_text")
    assert walked.outcome == "exact"
    assert walked.accepted > 0


@torch.no_grad()
def test_layers_that_read_tokens_and_borrow_kv_run_one_by_one() -> None:
    """Layers 1 and 2 lend their K/V to layers 3 and 4."""
    model, tokens = own("gemma4_text"), some_tokens(9)
    assert model.spec.lending_layers == {1, 2}
    for mask in (None, SkipMask(5, attn=(0, 1), mlp=(3,)), SkipMask(5, attn=(1, 2), mlp=(1,))):
        logits = []
        for run in (forward, run_layer_loop):
            cache, planner = model.new_cache(1, 16), Planner(16, model.spec.device)
            logits.append(run(model, tokens, cache, planner.plan_chain(0, 9), mask))
        torch.testing.assert_close(*logits)


@torch.no_grad()
def test_attention_whose_kv_others_read_is_not_skipped() -> None:
    model, tokens = own("gemma4_text"), some_tokens(9)
    cache, planner = model.new_cache(1, 16), Planner(16, model.spec.device)
    plan = planner.plan_chain(0, 9)
    whole, lent, other = (
        forward(model, tokens, cache, plan, mask)
        for mask in (None, SkipMask(5, attn=(1, 2)), SkipMask(5, attn=(3,)))
    )
    torch.testing.assert_close(lent, whole)
    assert not torch.allclose(other, whole)


def test_replay_runs_the_layers_that_lend_kv_again() -> None:
    model = own("gemma4_text")
    model.spec = replace(model.spec, eos_token_ids=())
    replay = Replay(model, [[3, 9, 4, 1], [22, 17, 5]], 12, None)
    assert all(r.acceptance.all() for r in replay(SkipMask(5)))
    assert all(r.acceptance.all() for r in replay(SkipMask(5, attn=(2,))))
    assert not all(r.acceptance.all() for r in replay(SkipMask(5, attn=(3, 4), mlp=(3, 4))))


@given(
    st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=9),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_hidden_states_carry_any_token_in_any_dtype(ids: list[int], dtype: torch.dtype) -> None:
    tokens, hidden = torch.tensor([ids]), torch.ones(1, len(ids), 4, dtype=dtype)
    states, carried = detach_tokens(attach_tokens(hidden, tokens))
    assert torch.equal(states, hidden)
    assert torch.equal(carried, tokens)
