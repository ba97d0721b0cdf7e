"""Continuing many prompts at once ends each where decoding it alone does, with the same tokens."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import VOCAB, small_world, tiny_llama, with_eos
from hypothesis import given, settings
from hypothesis import strategies as st

from skipsearch.decoding import Decoder
from skipsearch.errors import ModelError
from skipsearch.evaluation import together
from skipsearch.evaluation.together import continue_together
from skipsearch.models import ModelAdapter, adapt

prompts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=6)


def alone(model: ModelAdapter, prompt: list[int], max_new_tokens: int, end_on_repeat: int | None) -> list[int]:
    return Decoder(model).generate(prompt, max_new_tokens, end_on_repeat=end_on_repeat).tokens


@given(prompts, st.integers(1, 20), st.sampled_from([None, 2, 6]))
@settings(max_examples=20, deadline=None)
def test_the_tokens_are_those_of_decoding_alone(chosen: list[list[int]], max_new_tokens: int, end_on_repeat: int | None) -> None:
    model, _ = small_world()
    expected = [alone(model, p, max_new_tokens, end_on_repeat) for p in chosen]
    assert continue_together(model, chosen, max_new_tokens, end_on_repeat) == expected


def test_a_row_ends_at_its_end_of_sequence_and_the_others_go_on() -> None:
    free, _ = small_world()
    several = [[5, 17, 40], [9], [3, 3, 8, 1, 30, 22]]
    eos = alone(free, several[0], 12, None)[4]
    model = with_eos(free, eos)
    found = continue_together(model, several, 12, None)
    assert found == [alone(model, p, 12, None) for p in several]
    assert found[0][-1] == eos
    assert len(found[0]) <= 5
    assert max(map(len, found)) == 12


def test_progress_and_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small_world()
    monkeypatch.setattr(together, "TOGETHER", 2)
    seen: list[tuple[int, int]] = []
    several = [[1, 2, 3], [4], [5, 6], [7] * 9, [8, 9]]
    found = continue_together(model, several, 6, None, lambda done, total: seen.append((done, total)))
    assert found == [alone(model, p, 6, None) for p in several]
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_a_model_whose_logits_are_not_numbers_is_named() -> None:
    hf = tiny_llama()
    with torch.no_grad():
        hf.lm_head.weight[7, 3] = torch.nan
    with pytest.raises(ModelError, match="logits are not numbers"):
        continue_together(adapt(hf), [(5, 17), (3,)], 8, None)
