"""What the rules promise, on made-up times: tests/benchmarks/sequential_rules.py has more of them.

A share of 1,000 runs has a standard error of 0.7 percentage points.
"""

from __future__ import annotations

import pytest
from benchmarks.sequential_rules import (
    RACES,
    compute_coverage,
    find_true_speedup,
    simulate_measurements,
    simulate_races,
)


@pytest.mark.parametrize(
    ("variation", "n_prompts"),
    [
        pytest.param(0.1, 64, id="most-stop-early"),
        pytest.param(0.1, 32, id="some-stop-early", marks=pytest.mark.thorough),
        pytest.param(0.35, 8, id="few-prompts"),
        pytest.param(0.2, 32, id="all-prompts"),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(variation: float, n_prompts: int) -> None:
    measured = simulate_measurements(1000, n_prompts, variation, correlation=0.3)
    assert 0.93 <= compute_coverage(measured, find_true_speedup(variation, 0.3)) <= 0.97


@pytest.mark.parametrize("name", ["three others 5 % slower", "five others 5 % slower"])
def test_what_is_five_per_cent_faster_than_the_winner_seldom_drops_out(name: str) -> None:
    winners, _ = simulate_races(200, RACES[name], error=0.05)
    assert (winners >= 1.05).mean() <= 0.05
