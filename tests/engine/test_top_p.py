"""Top-p keeps the fewest likeliest tokens with enough probability, as transformers' warper does."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from skipsearch.engine.sampler import TopPWarper

shares = st.sampled_from([1e-6, 0.3, 0.9, 0.999])


@with_examples(60)
@given(
    n_tokens=st.sampled_from([1, 3, 64, 65, 5000]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    top_p=shares,
    seed=st.integers(0, 99),
)
def test_it_keeps_what_transformers_keeps(
    n_tokens: int, scale: float, top_p: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, n_tokens, dtype=torch.float64, generator=random)
    logits[0, 1:] = -inf  # as top-k leaves them
    expected = TopPLogitsWarper(top_p)(None, logits)  # type: ignore[arg-type]
    assert torch.equal(TopPWarper(top_p)(None, logits), expected)


@with_examples(100)
@given(row=st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=1, max_size=200), top_p=shares)
def test_of_tokens_that_tie_the_first_are_kept_and_no_more_than_needed(
    row: list[float], top_p: float
) -> None:
    logits = torch.tensor(row, dtype=torch.float64)
    kept = TopPWarper(top_p)(None, logits[None])[0].isfinite()
    probs = logits.softmax(-1)
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    n_kept = int(kept.sum())
    assert sorted(order[:n_kept]) == kept.nonzero()[:, 0].tolist()
    assert float(probs[kept].sum()) > top_p - 1e-9
    assert float(probs[order[: n_kept - 1]].sum()) < top_p


@pytest.mark.parametrize("bad", [nan, inf], ids=str)
def test_a_row_without_numbers_keeps_none(bad: float) -> None:
    """Its distribution is NaN then, which the acceptance reports."""
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 2.0, 1.0]])
    kept = TopPWarper(0.5)(None, logits)
    assert bool(kept[0].softmax(-1).isnan().all())
    assert kept[1].isfinite().tolist() == [False, True, False]
