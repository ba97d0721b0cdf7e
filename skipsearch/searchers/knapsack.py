"""`knapsack`: the most time saved for a given loss of acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem, require
from skipsearch.searchers.fixed_order import FixedOrderSearcher
from skipsearch.searchers.predictions import independent_alpha, log_losses, predicted_speedup

MAX_LOSS = 3.0  # -log α; a draft that is accepted once in twenty times never pays
LOSS_STEPS = 1024  # resolution of the loss


class Knapsack(FixedOrderSearcher):
    """A searcher that saves the most seconds that each limit of lost acceptance allows.

    This is a 0/1 knapsack for each limit, solved exactly except for the rounding of losses. The
    weight of a unit is its -log α if it is skipped alone; these add up if losses are independent.
    Its value is its seconds in the latency table. Unlike `sensitivity`, it trades an expensive
    attention against cheap MLPs, so its masks are not nested. The mask with the best prediction
    comes first.

    Raises: SearchError without evidence.single_skip_acceptance or evidence.costs.
    Source: Bellman's dynamic program (Kellerer, Pferschy & Pisinger 2004).
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        measure = require(
            problem.evidence.single_skip_acceptance, "single_skip_acceptance", "knapsack"
        )
        return _save_most(problem, measure, require(problem.evidence.costs, "costs", "knapsack"))


def _save_most(
    problem: SearchProblem, measure: Callable[[], Sequence[float]], costs: Costs
) -> Iterator[SkipMask]:
    """Yield the mask of each limit of lost acceptance, best prediction first."""
    loss = log_losses(problem, measure())
    seconds = [sum(costs.sublayers[s] for s in unit) for unit in problem.units]
    budget = min(MAX_LOSS, sum(loss))
    weights = [round(x / budget * LOSS_STEPS) if budget else 0 for x in loss]
    packed = {problem.mask_of(units) for units in solve_knapsack(weights, seconds, LOSS_STEPS)}
    yield from sorted(
        packed,
        key=lambda mask: (
            -predicted_speedup(mask, independent_alpha(problem, mask, loss), costs),
            mask.bits,
        ),
    )


def solve_knapsack(
    weights: Sequence[int], values: Sequence[float], capacity: int
) -> Iterator[frozenset[int]]:
    """Yield the most valuable set of items for each capacity from 0 to `capacity`."""
    best = np.zeros(capacity + 1)  # value by capacity, with the items so far
    taken = np.zeros((len(weights), capacity + 1), dtype=bool)
    for item, (weight, value) in enumerate(zip(weights, values, strict=True)):
        if weight > capacity:
            continue
        with_it = best[: capacity + 1 - weight] + value
        taken[item, weight:] = with_it > best[weight:]
        best[weight:] = np.maximum(best[weight:], with_it)
    for limit in range(capacity + 1):
        chosen, remaining = set(), limit
        for item in reversed(range(len(weights))):
            if taken[item, remaining]:
                chosen.add(item)
                remaining -= weights[item]
        yield frozenset(chosen)
