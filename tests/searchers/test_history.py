"""What adaptive searchers learn from: one fidelity, logs, and noise."""

from __future__ import annotations

import math

import pytest

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState
from skipsearch.searchers import SearchProblem
from skipsearch.searchers.history import MIN_RELATIVE_ERROR, TrialHistory

A, B, C = (SkipMask(4, attn=(i,)) for i in range(3))


def memory(*trials: Trial, problem: SearchProblem | None = None) -> TrialHistory:
    told = TrialHistory(problem or SearchProblem(4))
    for trial in trials:
        told.add(trial)
    return told


def test_times_become_logs_and_their_errors_follow_by_the_delta_method() -> None:
    (judged,) = memory(Trial(A, 0.02, stderr=0.001)).observations()
    assert judged.units == {0}
    assert judged.log_time == pytest.approx(math.log(0.02))
    assert judged.variance == pytest.approx(0.05**2)


def test_times_count_relative_to_the_baseline_measured_beside_them() -> None:
    noisy = memory(
        Trial(A, 0.02, baseline_seconds_per_token=0.04),
        Trial(B, 0.06, baseline_seconds_per_token=0.12),
    )
    assert [j.log_time for j in noisy.observations()] == pytest.approx([math.log(0.5)] * 2)


def test_one_trial_without_a_baseline_makes_all_times_absolute() -> None:
    mixed = memory(Trial(A, 0.02, baseline_seconds_per_token=0.04), Trial(B, 0.06))
    assert [j.log_time for j in mixed.observations()] == pytest.approx(
        [math.log(0.02), math.log(0.06)]
    )


def test_an_error_of_nought_is_not_believed() -> None:
    assert memory(Trial(A, 0.02, stderr=0.0)).observations()[0].variance == MIN_RELATIVE_ERROR**2


@pytest.mark.parametrize(
    ("seconds", "state"),
    [
        (math.inf, TrialState.COMPLETE),
        (math.nan, TrialState.COMPLETE),
        (0.0, TrialState.COMPLETE),
        (0.02, TrialState.FAILED),
    ],
)
def test_a_trial_that_gave_no_time_is_infinitely_slow(seconds: float, state: TrialState) -> None:
    told = memory(Trial(A, seconds, state=state), Trial(B, 0.03))
    assert [j.log_time for j in told.observations()] == [math.inf, pytest.approx(math.log(0.03))]
    best = told.best()
    assert best is not None
    assert best.units == {2}


def test_the_fidelity_told_most_of_is_the_one_learned_from() -> None:
    told = memory(
        Trial(A, 0.01, fidelity="replay"),
        Trial(B, 0.02, fidelity="replay"),
        Trial(C, 0.5, fidelity="wall"),
    )
    assert [j.units for j in told.observations()] == [{0}, {2}]


def test_wall_clock_wins_a_tie() -> None:
    told = memory(Trial(A, 0.01, fidelity="replay"), Trial(C, 0.5, fidelity="wall"))
    assert [j.units for j in told.observations()] == [{4}]


def test_a_mask_told_again_counts_once_with_its_later_time() -> None:
    told = memory(Trial(A, 0.01), Trial(B, 0.02), Trial(A, 0.03))
    assert [(j.units, round(math.exp(j.log_time), 6)) for j in told.observations()] == [
        ({0}, 0.03),
        ({2}, 0.02),
    ]


def test_masks_outside_the_search_space_are_remembered_and_not_learned_from() -> None:
    told = memory(
        Trial(A, 0.01), Trial(B, 0.02), problem=SearchProblem(4, never_skip=frozenset({0}))
    )
    assert [j.log_time for j in told.observations()] == pytest.approx([math.log(0.02)])
    assert A in told.excluded(())


def test_told_pending_and_empty_masks_are_taken() -> None:
    assert memory(Trial(A, 0.01)).excluded([B]) == {A, B, SkipMask(4)}


def test_nothing_told_is_nothing_known() -> None:
    assert memory().observations() == ()
    assert memory().best() is None
