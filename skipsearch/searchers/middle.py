"""`middle`: skip symmetrically from the middle."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine


class Middle(FixedOrderSearcher):
    """A searcher that skips n consecutive sub-layers around the middle, for each n once.

    The first mask skips half of the model.

    Source: S3D (section 5.3 and figure 4: symmetric middle skipping keeps the most acceptance for
        its count); "Mid." in Draft & Verify, table 7.
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        order = order_from_middle(problem)
        return (problem.mask_of(order[:count]) for count in coarse_to_fine(len(order)))


def order_from_middle(problem: SearchProblem) -> tuple[int, ...]:
    """Return the units by their distance to the middle of the model, nearest first.

    Of two units at the same distance, the earlier one comes first.
    """
    middle = problem.n_layers - 0.5  # of flat sub-layer indices 0..2L-1
    centres = [sum(unit) / len(unit) for unit in problem.units]
    return tuple(sorted(range(len(centres)), key=lambda u: (abs(centres[u] - middle), u)))
