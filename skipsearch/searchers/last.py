"""`last`: skip the model's last sub-layers."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine


class Last(FixedOrderSearcher):
    """A searcher that skips the last n sub-layers, for each n once. This is early exit as a mask.

    The first mask skips half of the model.

    Source: "Last" in Draft & Verify (Zhang et al. 2024), table 7; early exit as in LayerSkip
    (Elhoushi et al. 2024).
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        n = len(problem.units)
        return (problem.mask_of(range(n - count, n)) for count in coarse_to_fine(n))
