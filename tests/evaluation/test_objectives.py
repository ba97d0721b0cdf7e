"""The replay objective: a mask that is clearly behind on a sample of the text is not replayed on the rest of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.tiny import LAYERS
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.evaluation.objectives import ReplayObjective, _rungs
from skipsearch.evaluation.replay import Replayed
from skipsearch.evaluation.sweep import exploring
from skipsearch.mask import SkipMask

from .small_search import COSTS

GOOD, FAIR, BAD = SkipMask(LAYERS, (1, 2, 3)), SkipMask(LAYERS, (1, 2), (3,)), SkipMask(LAYERS, (1,), (2, 3))
LATE = SkipMask(LAYERS, (0, 1, 2, 3))
RIGHT = {GOOD: 0.95, FAIR: 0.98, BAD: 0.05, LATE: 0.05}


class Scripted:
    """Six batches of five prompts; a mask is right as often as RIGHT says."""

    def __init__(self, batches: int = 6):
        self.batches, self.asked = range(batches), []

    asked: list[tuple[SkipMask, tuple[int, ...] | None]]

    def __call__(self, mask: SkipMask, most_prompts: int | None = None, only: Sequence[int] | None = None) -> list[Replayed]:
        self.asked.append((mask, None if only is None else tuple(only)))
        random = np.random.default_rng(1)
        every = [[Replayed(random.random(40) < RIGHT[mask], np.full(40, 0.9), 60) for _ in range(5)] for _ in self.batches]
        return [r for i in (self.batches if only is None else only) for r in every[i]]


def objective(replay: Any) -> ReplayObjective:
    return ReplayObjective(replay, COSTS)


def test_a_mask_that_is_clearly_behind_is_judged_by_the_sample_alone() -> None:
    replay = Scripted()
    judge = objective(replay).judge
    good, _ = judge(GOOD)
    bad, policy = judge(BAD)
    assert replay.asked == [(GOOD, (1,)), (GOOD, (4,)), (GOOD, (0, 2, 3, 5)), (BAD, (1,))]
    assert bad.seconds_per_token > good.seconds_per_token
    assert bad.alpha == pytest.approx(0.05, abs=0.05)
    assert policy.draft_length == 1


def test_the_trial_of_a_sample_is_in_proportion_to_the_best_mask_there_and_on_all_of_the_text() -> None:
    replay = Scripted()
    judge, by_sample = objective(replay).judge, objective(replay)
    good, bad = judge(GOOD)[0], judge(BAD)[0]
    policies = exploring(len(COSTS.verify) - 1)
    there = {mask: by_sample._best(replay(mask, only=(1,)), mask, policies)[1].seconds_per_token for mask in (GOOD, BAD)}
    assert there[GOOD] != good.seconds_per_token
    assert bad.seconds_per_token / good.seconds_per_token == pytest.approx(there[BAD] / there[GOOD])


def test_a_mask_that_may_be_better_is_judged_on_all_of_the_text_and_so_is_the_first() -> None:
    replay = Scripted()
    judge = objective(replay).judge
    for mask in (GOOD, FAIR):
        trial, policy = judge(mask)
        whole, prediction = objective(Scripted()).best_policy(mask)
        assert policy == whole
        assert trial.seconds_per_token == pytest.approx(prediction.seconds_per_token)
    assert len(replay.asked) == 6


def test_what_a_mask_is_compared_with_is_the_best_one_on_the_same_sample() -> None:
    replay = Scripted()
    judge = objective(replay).judge
    judge(BAD)
    judge(GOOD)   # takes the lead
    judge(BAD)
    assert [only for _, only in replay.asked] == [(1,), (4,), (0, 2, 3, 5), (1,), (4,), (0, 2, 3, 5), (1,)]


def test_a_mask_that_falls_behind_later_is_judged_by_what_was_replayed_until_then() -> None:
    class Late(Scripted):
        """LATE is as right as GOOD on the first sample, and seldom behind it."""

        def __call__(self, mask: SkipMask, most_prompts: int | None = None, only: Sequence[int] | None = None) -> list[Replayed]:
            found = super().__call__(GOOD if only == (1,) else mask, most_prompts, only)
            self.asked[-1] = (mask, self.asked[-1][1])
            return found

    replay = Late()
    judge = objective(replay).judge
    judge(GOOD)
    trial, _ = judge(LATE)
    assert replay.asked[3:] == [(LATE, (1,)), (LATE, (4,))]
    assert trial.alpha is not None
    assert 0.2 < trial.alpha < 0.8, "half of it good, half of it bad"


@given(st.integers(1, 60))
def test_every_batch_is_on_one_rung(batches: int) -> None:
    rungs = _rungs(batches)
    assert sorted(i for rung in rungs for i in rung) == list(range(batches))
    assert all(rungs)
    assert len(rungs) == (1 if batches < 5 else 3)


def test_of_few_batches_no_sample_is_taken() -> None:
    replay = Scripted(batches=2)
    objective(replay).judge(GOOD)
    assert replay.asked == [(GOOD, (0, 1))]


def test_the_surface_holds_every_fixed_length_and_threshold_once() -> None:
    surface = objective(Scripted()).surface(GOOD)
    most = len(COSTS.verify) - 1
    assert {p["kind"] for p in surface} == {"fixed", "confidence"}
    assert [p["draft_length"] for p in surface if p["kind"] == "fixed"] == list(range(1, most + 1))
    assert len({(p["kind"], p["draft_length"], p["threshold"]) for p in surface}) == len(surface)
    fixed = [p["speedup"] for p in objective(Scripted()).surface(BAD) if p["kind"] == "fixed"]
    assert fixed == sorted(fixed, reverse=True), "a mask that is nearly always wrong loses by drafting more"
