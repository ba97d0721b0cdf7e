"""`first`: skip the model's first sub-layers."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine


class First(FixedOrderSearcher):
    """A searcher that skips the first n sub-layers, for each n once.

    It is a reference that should lose. The first mask skips half of the model.

    Source: "First" in Draft & Verify (Zhang et al. 2024), table 7.
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        return (problem.mask_of(range(count)) for count in coarse_to_fine(len(problem.units)))
