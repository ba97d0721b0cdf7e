"""The replay objective: a mask that is clearly behind on a sample of the text is not replayed on
the rest of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.tiny import LAYERS
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.replay.replay import PromptReplay
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.replay.segments import Segment
from skipsearch.replay.sweep import coarse_policies
from skipsearch.tuning.objective import MIN_RUNG_PROMPTS, ReplayObjective, _split_rungs
from tuning.small_search import COSTS

GOOD, FAIR, BAD = (
    SkipMask(LAYERS, (1, 2, 3)),
    SkipMask(LAYERS, (1, 2), (3,)),
    SkipMask(LAYERS, (1,), (2, 3)),
)
LATE = SkipMask(LAYERS, (0, 1, 2, 3))
RIGHT = {GOOD: 0.95, FAIR: 0.98, BAD: 0.05, LATE: 0.05}
FIRST, SECOND, THIRD = (
    (1, 13),
    (7, 19),
    (4, 10, 16, 22),
)  # rungs of 24 batches; the last one has the rest
REST = tuple(i for i in range(24) if i not in FIRST + SECOND + THIRD)
PROMPTS = 5  # of a batch


class Batches(list[int]):
    """So many, by their indices."""

    @property
    def prompt_indices(self) -> list[tuple[int, ...]]:
        return [tuple(range(PROMPTS * i, PROMPTS * (i + 1))) for i in self]


class Scripted:
    """Batches of five prompts; a mask is right as often as RIGHT says."""

    vocabulary = drafting_model = None

    def __init__(self, batches: int = 24):
        self.batches = Batches(range(batches))
        self.segments = [Segment(text, 0, 4) for text in range(PROMPTS * batches)]  # a short text
        self.asked: list[tuple[SkipMask, tuple[int, ...] | None]] = []

    def __call__(
        self,
        mask: SkipMask,
        most_prompts: int | None = None,
        batch_indices: Sequence[int] | None = None,
    ) -> list[PromptReplay]:
        self.asked.append((mask, None if batch_indices is None else tuple(batch_indices)))
        random = np.random.default_rng(1)
        every = [
            [
                PromptReplay(random.random(40) < RIGHT[mask], np.full(40, 0.9), 60)
                for _ in range(PROMPTS)
            ]
            for _ in self.batches
        ]
        return [
            r for i in (self.batches if batch_indices is None else batch_indices) for r in every[i]
        ]

    def judge(
        self,
        mask: SkipMask,
        vocabularies: Sequence[None],
        batch_indices: Sequence[int],
        drafting_model: None,
    ) -> list[list[PromptReplay]]:
        return [self(mask, batch_indices=batch_indices) for _ in vocabularies]


def objective(replay: Any) -> ReplayObjective:
    return ReplayObjective(replay, COSTS)


def test_a_mask_that_is_clearly_behind_is_judged_by_the_sample_alone() -> None:
    replay = Scripted()
    judge = objective(replay).judge
    good, bad = judge(GOOD), judge(BAD)
    assert replay.asked == [
        (GOOD, FIRST),
        (GOOD, SECOND),
        (GOOD, THIRD),
        (GOOD, REST),
        (BAD, FIRST),
    ]
    assert bad.seconds_per_token > good.seconds_per_token
    assert bad.alpha == pytest.approx(0.05, abs=0.05)
    assert bad.recipe is not None
    assert bad.recipe.drafters[0].draft_length == 1


@pytest.mark.parametrize(
    ("verify_s", "allows"), [(0.0003, True), (0.011, False)], ids=["cheap rows", "dear rows"]
)
def test_masks_are_searched_only_if_some_mask_may_pay(
    verify_s: float, allows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If checking a token costs as much as writing it, not even a free draft that is always right
    gains anything.
    """
    nothing, everything = SkipMask(LAYERS), SkipMask.from_layers(LAYERS, range(LAYERS))
    monkeypatch.setitem(RIGHT, nothing, 1.0)
    costs = replace(COSTS, verify=tuple(0.01 + verify_s * rows for rows in range(9)))
    replay = Scripted()
    bound = ReplayObjective(replay, costs).predict_bound(everything)  # type: ignore[arg-type]
    assert bound.allows_gain is allows
    assert bound.known_s <= costs.verify[0]
    assert replay.asked == [(nothing, FIRST)], "a small sample suffices"


def test_of_a_long_text_a_search_uses_a_third() -> None:
    replay = Scripted()
    replay.segments = [Segment(text, 0, 40) for text in range(PROMPTS * 24)]
    by_replay = objective(replay)
    by_replay.judge(GOOD)
    assert replay.asked == [(GOOD, FIRST), (GOOD, SECOND), (GOOD, THIRD)]
    by_replay.best_recipe(GOOD, fine=True, siblings=False)
    assert replay.asked[3:] == [(GOOD, None)], "the best masks are judged on all of it"


def test_a_mask_that_was_judged_on_all_of_the_text_is_not_replayed_again() -> None:
    replay = Scripted()
    by_replay = objective(replay)
    trial = by_replay.judge(GOOD)
    replay.asked.clear()
    best = by_replay.best_recipe(GOOD, fine=True, siblings=False)
    assert not replay.asked
    assert best.seconds_per_token <= 1.02 * trial.seconds_per_token


def test_the_trial_of_a_sample_is_in_proportion_to_the_best_mask_there_and_on_all_of_the_text() -> (
    None
):
    replay = Scripted()
    judge, by_sample = objective(replay).judge, objective(replay)
    good, bad = judge(GOOD), judge(BAD)
    policies = coarse_policies(len(COSTS.verify) - 1)
    there = {
        mask: by_sample.predict_best(
            rounds_from_replay(replay(mask, batch_indices=FIRST)), mask, policies, [()]
        ).seconds_per_token
        for mask in (GOOD, BAD)
    }
    assert there[GOOD] != good.seconds_per_token
    assert bad.seconds_per_token / good.seconds_per_token == pytest.approx(there[BAD] / there[GOOD])


def test_a_mask_that_may_be_better_is_judged_on_all_of_the_text_and_so_is_the_first() -> None:
    replay = Scripted()
    judge = objective(replay).judge
    for mask in (GOOD, FAIR):
        trial, whole = judge(mask), objective(Scripted()).best_recipe(mask)
        assert trial.recipe == whole.recipe
        assert trial.seconds_per_token == pytest.approx(whole.seconds_per_token)
    assert len(replay.asked) == 8


def test_what_a_mask_is_compared_with_is_the_best_one_on_the_same_sample() -> None:
    replay = Scripted()
    judge = objective(replay).judge
    judge(BAD)
    judge(GOOD)  # takes the lead
    judge(BAD)
    assert [only for _, only in replay.asked] == [
        FIRST,
        SECOND,
        THIRD,
        REST,
        FIRST,
        SECOND,
        THIRD,
        REST,
        FIRST,
    ]


def test_a_mask_that_falls_behind_later_is_judged_by_what_was_replayed_until_then() -> None:
    class Late(Scripted):
        """LATE is as right as GOOD on the first sample, and seldom behind it."""

        def __call__(
            self,
            mask: SkipMask,
            most_prompts: int | None = None,
            batch_indices: Sequence[int] | None = None,
        ) -> list[PromptReplay]:
            found = super().__call__(
                GOOD if batch_indices == FIRST else mask, most_prompts, batch_indices
            )
            self.asked[-1] = (mask, self.asked[-1][1])
            return found

    replay = Late()
    judge = objective(replay).judge
    judge(GOOD)
    trial = judge(LATE)
    assert replay.asked[4:] == [(LATE, FIRST), (LATE, SECOND)]
    assert trial.alpha is not None
    assert 0.2 < trial.alpha < 0.8, "half of it good, half of it bad"


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_every_batch_is_on_one_rung_and_no_sample_is_of_few_prompts(sizes: list[int]) -> None:
    rungs = _split_rungs(sizes)
    assert sorted(i for rung in rungs for i in rung) == list(range(len(sizes)))
    assert all(rungs)
    assert all(sum(sizes[i] for i in rung) >= MIN_RUNG_PROMPTS for rung in rungs[:-1])


def test_rungs_double_where_there_are_prompts_enough() -> None:
    assert [len(rung) for rung in _split_rungs([2] * 48)] == [4, 4, 8, 32]
    assert [len(rung) for rung in _split_rungs([1] * 24)] == [4, 4, 16], (
        "a twelfth would be two prompts"
    )


def test_of_few_prompts_no_sample_is_taken() -> None:
    replay = Scripted(batches=1)
    objective(replay).judge(GOOD)
    assert replay.asked == [(GOOD, (0,))]
