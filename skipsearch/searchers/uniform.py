"""`uniform`: skip every so-many-th sub-layer."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine


class Uniform(FixedOrderSearcher):
    """Skips attentions and MLPs at even distances, as many of one as of the other, every count
    once, half of the model first.

    Neighbouring layers hold similar information, so a gap between two kept ones hurts little.
    Spread over the sub-layers as one row, every even distance would hit one kind alone. Source:
    rule 1 of ASD (Metel et al. 2024); S3D, figure 4, alternate."""

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        kinds = [
            [u for u, unit in enumerate(problem.units) if unit[0] % 2 == kind] for kind in (0, 1)
        ]
        n = len(problem.units)

        def spread(count: int) -> SkipMask:
            of_first = (2 * count * len(kinds[0]) + n) // (2 * n)
            return problem.mask_of(
                [
                    units[k]
                    for units, share in zip(kinds, (of_first, count - of_first), strict=True)
                    for k in evenly_spaced(len(units), share)
                ]
            )

        return (spread(count) for count in coarse_to_fine(n))


def evenly_spaced(n: int, count: int) -> tuple[int, ...]:
    """`count` of 0..n-1 at even distances, as far from both ends as from each other."""
    return tuple((2 * k + 1) * n // (2 * count) for k in range(count))
