"""`knapsack`: the most seconds for the least acceptance, solved exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from skipsearch.searchers import make_searcher
from skipsearch.searchers.knapsack import solve_knapsack
from skipsearch.searchers.predictions import independent_alpha, log_losses, predicted_speedup

from .toy import ToyModel, drive

WEIGHTS, VALUES = (3, 4, 0, 7, 2, 30), (5.0, 6.0, 1.0, 12.0, 2.0, 99.0)


def test_packing_is_as_good_as_trying_everything() -> None:
    for room, items in enumerate(solve_knapsack(WEIGHTS, VALUES, capacity=12)):
        assert sum(WEIGHTS[i] for i in items) <= room
        fits = [
            s
            for k in range(7)
            for s in itertools.combinations(range(6), k)
            if sum(WEIGHTS[i] for i in s) <= room
        ]
        assert sum(VALUES[i] for i in items) == max(sum(VALUES[i] for i in s) for s in fits)


def test_the_first_mask_is_the_best_of_all_by_the_prediction() -> None:
    problem = ToyModel.random(4, seed=3).problem()
    measure, costs = problem.evidence.single_skip_acceptance, problem.evidence.costs
    assert measure is not None
    assert costs is not None
    loss = log_losses(problem, measure())

    def predicted(units: tuple[int, ...]) -> float:
        mask = problem.mask_of(units)
        return predicted_speedup(mask, independent_alpha(problem, mask, loss), costs)

    first = make_searcher("knapsack", problem).ask()
    assert first is not None
    best = max(
        predicted(units) for k in range(1, 9) for units in itertools.combinations(range(8), k)
    )
    assert math.isclose(
        predicted(tuple(sorted(problem.units_of(first) or ()))), best, rel_tol=2e-3
    )  # losses are rounded


def test_a_dear_attention_gives_way_to_cheap_mlps_and_back() -> None:
    """Not nested: some sub-layer that a light mask skips is kept by a heavier one."""
    toy = ToyModel.random(8, seed=1)
    sets = [
        trial.mask.sublayers for trial in drive(make_searcher("knapsack", toy.problem()), toy, 200)
    ]
    assert any(len(a) < len(b) and not a <= b for a, b in itertools.permutations(sets, 2))


def test_a_model_that_loses_nothing_is_skipped_altogether() -> None:
    toy = replace(ToyModel.random(2), harms=(0.0,) * 4)
    first = make_searcher("knapsack", toy.problem()).ask()
    assert first is not None
    assert first.n_skipped == 4
