"""`sensitivity`: skip what hurts least when it is skipped alone."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.mask import SkipMask
from skipsearch.searchers.base import SearchProblem, required
from skipsearch.searchers.predict import costs_or_equal, independent_alpha, losses, predicted_speedup
from skipsearch.searchers.ranked import RankedSearcher


class Sensitivity(RankedSearcher):
    """Ranks sub-layers by the acceptance lost without each alone and skips the least harmful 1, 2, 3, … of them.

    Nested masks, the most promising count first: losses are taken as independent, so that a mask's α is the product of its
    sub-layers', and the count is judged by the speedup that α and the measured costs predict (equal costs if none are).
    Raises: SearchError without evidence.acceptance_without.
    Source: one-at-a-time importance, as in the pruning literature (e.g. Michel et al. 2019); Leviathan et al. 2023, theorem 3.8.
    """

    def masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        loss = losses(problem, required(problem.evidence.acceptance_without, "acceptance_without", "sensitivity"))
        costs = costs_or_equal(problem)
        order = sorted(range(len(loss)), key=lambda u: (loss[u], u))
        return iter(sorted((problem.mask_of(order[:count]) for count in range(1, len(order) + 1)),
                           key=lambda mask: -predicted_speedup(mask, independent_alpha(problem, mask, loss), costs)))
