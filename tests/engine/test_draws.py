"""Draws of tokens follow their weights, whatever these are."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.engine.draws import draw_distinct_tokens, draw_tokens


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_are_as_frequent_as_their_weights(dtype: torch.dtype) -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.5, 5.5, 0.0], dtype=dtype)
    n = 40_000
    drawn = draw_tokens(weights.expand(n, -1), seeded())
    counts = Counter(drawn[:, 0].tolist())
    assert set(counts) == {1, 2, 4, 5}
    for token, count in counts.items():
        share = float(weights[token]) / 10
        assert abs(count / n - share) < 5 * (share * (1 - share) / n) ** 0.5


@with_examples(200)
@given(
    st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 1e-7, 0.3, 1.0, 7.5]), min_size=1, max_size=40),
    st.integers(0, 9),
)
def test_a_token_of_weight_zero_is_never_drawn(weights: list[float], seed: int) -> None:
    if not any(weights):
        weights[-1] = 1.0
    token = int(draw_tokens(torch.tensor(weights), seeded(seed)))
    assert weights[token] > 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_the_interval_are_tokens_with_a_weight(
    uniform: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rand(shape: torch.Size, *, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, uniform, dtype=dtype)

    monkeypatch.setattr(torch, "rand", rand)
    for weights in ([0.0, 1.0, 0.0], [0.0, 1e-45, 0.0, 0.0], [0.0, 0.1, 0.2, 0.3, 0.0]):
        token = int(draw_tokens(torch.tensor(weights), seeded()))
        assert weights[token] > 0


def test_each_row_has_a_draw_of_its_own_and_a_seed_repeats_them() -> None:
    weights = torch.rand(3, 4, 1000, generator=seeded(1))
    first = draw_tokens(weights, seeded())
    assert first.shape == (3, 4, 1)
    assert first.unique().numel() > 1
    assert torch.equal(first, draw_tokens(weights, seeded()))
    assert not torch.equal(first, draw_tokens(weights, seeded(2)))


@pytest.mark.parametrize("bad", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]], ids=str)
def test_weights_without_a_sum_are_refused(bad: list[float]) -> None:
    with pytest.raises(RuntimeError, match="no positive, finite sum"):
        draw_tokens(torch.tensor([[1.0, 1.0], bad]), seeded())


def test_distinct_tokens_are_drawn_in_turn_from_what_is_left() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    n = 40_000
    drawn = draw_distinct_tokens(weights.expand(n, -1), 2, seeded())
    counts = Counter(map(tuple, drawn.tolist()))
    expected = {
        (a, b): float(weights[a] * weights[b] / (1 - weights[a]))
        for a in (0, 2, 3)
        for b in (0, 2, 3)
        if a != b
    }
    assert set(counts) == set(expected)
    for pair, share in expected.items():
        assert abs(counts[pair] / n - share) < 5 * (share * (1 - share) / n) ** 0.5


@with_examples(100)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.2, 5.0]), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_distinct_tokens_are_distinct_and_those_with_a_weight_come_first(
    weights: list[float], count: int, seed: int
) -> None:
    count = min(count, len(weights))
    if not any(weights):
        weights[-1] = 1.0
    drawn = draw_distinct_tokens(torch.tensor(weights), count, seeded(seed)).tolist()
    assert len(set(drawn)) == count
    n_weighted = min(count, sum(weight > 0 for weight in weights))
    assert all(weights[token] > 0 for token in drawn[:n_weighted])
