"""`first`: skip the model's first sub-layers."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.ranked import RankedSearcher, coarse_to_fine


class First(RankedSearcher):
    """Skips the first sub-layers, every count once, half of the model first: a reference that should lose.

    Source: "First" in Draft & Verify (Zhang et al. 2024), table 7.
    """

    def masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        return (problem.mask_of(range(count)) for count in coarse_to_fine(len(problem.units)))
