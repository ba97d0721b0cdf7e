"""Continuing many prompts at once ends each where decoding it alone does, with the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny import VOCAB, tiny_llama, tiny_model_and_reference, to_native_8bit, with_eos
from hypothesis import given, settings
from hypothesis import strategies as st

from skipsearch.decoding import Decoder
from skipsearch.engine import forward
from skipsearch.engine.native import to_native
from skipsearch.engine.sampler import GREEDY, SamplingParams
from skipsearch.errors import ModelError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.kv_cache import Planner
from skipsearch.models.loading import placement
from skipsearch.replay import generate_together, text_kv
from skipsearch.replay.generate_together import (
    Continuation,
    continue_in_turn,
    generate_continuations,
)

SAMPLED = SamplingParams(0.7, top_p=0.95)
SAMPLINGS = [GREEDY, SAMPLED, SamplingParams(1.3), SamplingParams(0.9, top_k=5)]
prompts = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=6
)


def alone(
    model: ModelAdapter,
    prompt: list[int],
    max_new_tokens: int,
    end_on_repeat: int | None,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
) -> list[int]:
    return (
        Decoder(model)
        .generate(
            prompt,
            max_new_tokens,
            end_on_repeat=end_on_repeat,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
        )
        .tokens
    )


def tokens_of(continuations: list[Continuation]) -> list[list[int]]:
    return [continuation.tokens for continuation in continuations]


@given(
    prompts,
    st.integers(1, 20),
    st.sampled_from([None, 2, 6]),
    st.sampled_from(SAMPLINGS),
    st.integers(0, 2**32),
)
@settings(max_examples=15, deadline=None)
def test_the_tokens_are_those_of_decoding_alone(
    chosen: list[list[int]],
    max_new_tokens: int,
    end_on_repeat: int | None,
    sampling: SamplingParams,
    seed: int,
) -> None:
    model, _ = tiny_model_and_reference()
    expected = [
        alone(model, p, max_new_tokens, end_on_repeat, sampling, seed + i)
        for i, p in enumerate(chosen)
    ]
    for continued in (generate_continuations, continue_in_turn):
        assert (
            tokens_of(
                continued(
                    model, chosen, max_new_tokens, end_on_repeat, sampling=sampling, seed=seed
                )
            )
            == expected
        )


def test_a_row_ends_at_its_end_of_sequence_and_the_others_go_on() -> None:
    free, _ = tiny_model_and_reference()
    several = [[5, 17, 40], [9], [3, 3, 8, 1, 30, 22]]
    eos = alone(free, several[0], 12, None)[4]
    model = with_eos(free, eos)
    found = tokens_of(generate_continuations(model, several, 12, None))
    assert found == [alone(model, p, 12, None) for p in several]
    assert found[0][-1] == eos
    assert len(found[0]) <= 5
    assert max(map(len, found)) == 12


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=str)
def test_progress_counts_tokens_up_to_all_that_might_have_come(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_model_and_reference()
    monkeypatch.setattr(generate_together, "PROMPTS_PER_PASS", {"cpu": 2})
    seen: list[tuple[int, int]] = []
    several = [[1, 2, 3], [4], [5, 6], [7] * 9, [8, 9]]
    found = tokens_of(
        generate_continuations(
            model, several, 6, 2, lambda done, total: seen.append((done, total)), sampling
        )
    )
    assert found == [alone(model, p, 6, 2, sampling, i) for i, p in enumerate(several)]
    assert seen == sorted(seen), "it never goes back"
    assert {total for _, total in seen} == {30}
    assert seen[-1][0] == 30
    assert len(seen) >= sum(map(len, found)) / 2, "a report for each pass over two texts"


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=str)
def test_as_many_texts_go_through_a_pass_as_memory_allows(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_model_and_reference()
    several = [[1, 2, 3], [4], [5, 6], [7] * 9, [8, 9]]
    batches: list[int] = []
    forward = generate_together.forward
    monkeypatch.setattr(
        generate_together,
        "forward",
        lambda model, tokens, *rest, **options: (
            batches.append(len(tokens)) or forward(model, tokens, *rest, **options)
        ),
    )
    expected = generate_continuations(model, several, 6, None, sampling=sampling)
    assert len(batches) == 1 + 6, "a prefill, and a pass for each token"
    assert set(batches) == {5}
    two_texts = 2 * (3 + 6) * text_kv.bytes_of_a_slot(model) / text_kv.KV_MEMORY_FRACTION
    for free, largest in ((two_texts, 2), (0, 1)):
        batches.clear()
        monkeypatch.setattr(placement, "available_host_memory", lambda free=free: int(free))
        assert generate_continuations(model, several, 6, None, sampling=sampling) == expected
        assert max(batches) == largest


@pytest.mark.parametrize("engine", ["native", "native-8bit-float-activations"])
def test_on_an_engine_that_keeps_a_rows_bits_a_sample_does_not_depend_on_the_batch(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whose rounding would tell batches apart elsewhere."""
    hf = tiny_llama().float()
    model = to_native(adapt(hf, fuse=True)) if engine == "native" else to_native_8bit(hf)  # type: ignore[arg-type]
    several = [[(7 * i + j) % VOCAB for j in range(1 + 3 * i)] for i in range(9)]
    expected = [
        alone(model, p, 40, None, SamplingParams(1.0), 3 + i) for i, p in enumerate(several)
    ]
    for most in (1, 2, 9):
        monkeypatch.setattr(generate_together, "PROMPTS_PER_PASS", {"cpu": most})
        found = generate_continuations(
            model, several, 40, None, sampling=SamplingParams(1.0), seed=3
        )
        assert tokens_of(found) == expected


@pytest.mark.parametrize("most", [1, 2, 9])
def test_kv_are_kept_while_their_memory_lasts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny_model_and_reference()
    monkeypatch.setattr(generate_together, "PROMPTS_PER_PASS", {"cpu": most})

    def sizes(max_kv_bytes: float) -> list[int]:
        written = generate_continuations(
            model, [[5, 17, 40], [9], [3, 8]], 6, None, max_kv_bytes=max_kv_bytes
        )
        return [text.kv.nbytes for text in written if text.kv is not None]

    assert sizes(0) == []
    assert len(sizes(1)) == 1
    assert len(sizes(sum(sizes(1)) + 1)) == 2
    assert len(sizes(1e9)) == 3


def test_a_model_whose_logits_are_not_numbers_is_named() -> None:
    hf = tiny_llama()
    with torch.no_grad():
        hf.lm_head.weight[7, 3] = torch.nan
    with pytest.raises(ModelError, match="logits are not numbers"):
        generate_continuations(adapt(hf), [(5, 17), (3,)], 8, None)
    with pytest.raises(ModelError, match="logits are not numbers"):
        generate_continuations(adapt(hf), [(5, 17), (3,)], 8, None, sampling=SAMPLED)


@torch.no_grad()
def test_states_of_the_last_layer_are_those_of_each_text_alone() -> None:
    model, _ = tiny_model_and_reference()
    chosen = [[5, 17, 40], [9], [3, 3, 8, 1, 30, 22]]
    model = with_eos(model, alone(model, chosen[0], 12, None)[4])
    for prompt, text in zip(
        chosen, generate_continuations(model, chosen, 12, None, keep_states=True), strict=True
    ):
        read = torch.tensor([[*prompt, *text.tokens[:-1]]])
        inputs = dict[int, torch.Tensor]()
        forward(
            model,
            read,
            model.new_cache(1, read.shape[1]),
            Planner(read.shape[1], model.spec.device).plan_chain(0, read.shape[1]),
            tap=inputs.__setitem__,
        )
        n = model.spec.n_layers
        expected = torch.cat([inputs[n - 1], inputs[n]])
        torch.testing.assert_close(text.states, expected, rtol=1e-5, atol=1e-5)


def test_on_a_cpu_no_pass_has_rows_of_texts_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = tiny_model_and_reference()
    chosen = [[i, 3 * i, 7] for i in range(5)]
    ends = [alone(model, prompt, 24, None) for prompt in chosen]
    model = with_eos(model, ends[0][6])  # a token that some texts reach before others
    texts = [alone(model, prompt, 24, None) for prompt in chosen]
    assert len({len(text) for text in texts}) > 1
    rows = list[int]()

    def count_rows(model: ModelAdapter, token: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if token.shape[1] == 1:
            rows.append(len(token))
        return forward(model, token, *rest, **options)

    monkeypatch.setattr(generate_together, "forward", count_rows)
    assert tokens_of(generate_continuations(model, chosen, 24, None)) == texts
    assert rows == [sum(len(text) > step for text in texts) for step in range(len(rows))]
