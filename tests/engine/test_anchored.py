"""Anchored rows: each equals a pass over the text before its anchor, whatever its neighbours."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import VOCAB, tiny_model_and_reference, use_engine
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.engine import forward
from skipsearch.models import ModelAdapter
from skipsearch.models.kv_cache import KVCache, Planner

TEXT = torch.arange(3, 17)[None] % VOCAB
MASKS = (None, SkipMask(5, (1,), (2, 3)))
# Three groups: two rows after the first 4 tokens, three after 9, and one after the whole text.
ROWS = torch.tensor([[5, 9, 30, 2, 11, 7]])
POSITIONS = torch.tensor([[4, 5, 9, 10, 11, 14]])
ANCHORS = torch.tensor([[4, 4, 9, 9, 9, 14]])
GROUPS = torch.tensor([0, 0, 1, 1, 1, 2])


def read(model: ModelAdapter, text: Tensor = TEXT) -> tuple[KVCache, Planner]:
    cache, planner = model.new_cache(1, 40), Planner(40, torch.device("cpu"))
    forward(model, text, cache, planner.plan_chain(0, text.shape[1]))
    cache.length = text.shape[1]
    return cache, planner


def anchored(model: ModelAdapter, rows: Tensor, mask: SkipMask | None) -> Tensor:
    cache, planner = read(model)
    before = [
        t[:, :, : cache.length].clone() for t in (*cache.keys, *cache.values) if t is not None
    ]
    logits = forward(
        model, rows, cache, planner.plan_replay(cache.length, POSITIONS, ANCHORS, GROUPS), mask
    )[0]
    after = [t[:, :, : cache.length] for t in (*cache.keys, *cache.values) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        "what is committed stays bit for bit as it is"
    )
    return logits


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS, ids=["whole", "thinned"])
@pytest.mark.parametrize(
    "engine",
    [
        "hf",
        "lean",
        *(
            pytest.param(name, marks=pytest.mark.xdist_group("native"))
            for name in ("native", "native-8bit-float-activations")
        ),
    ],
)
def test_a_group_is_a_draft_behind_the_text_before_its_anchor(
    engine: str, mask: SkipMask | None
) -> None:
    with use_engine(engine):
        model, _ = tiny_model_and_reference()
    anchored_logits = anchored(model, ROWS, mask)
    for row in range(ROWS.shape[1]):
        mine = [r for r in range(row + 1) if GROUPS[r] == GROUPS[row]]
        anchor = int(ANCHORS[0, row])
        cache, planner = read(model, TEXT[:, :anchor])
        for r in mine:  # one after the other, as a draft is written
            logits = forward(
                model, ROWS[:, r : r + 1], cache, planner.plan_chain(int(POSITIONS[0, r]), 1), mask
            )[0, -1]
        torch.testing.assert_close(anchored_logits[row], logits, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("changed", range(6))
def test_a_row_that_changes_moves_no_row_but_those_behind_it_in_its_group(changed: int) -> None:
    model, _ = tiny_model_and_reference()
    other = ROWS.clone()
    other[0, changed] += 1
    before, after = anchored(model, ROWS, None), anchored(model, other, None)
    for row in range(ROWS.shape[1]):
        follows = row >= changed and GROUPS[row] == GROUPS[changed]
        assert torch.equal(before[row], after[row]) != bool(follows), row
