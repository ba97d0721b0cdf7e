"""`uniform`: skip evenly spaced attentions and MLPs."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine


class Uniform(FixedOrderSearcher):
    """A searcher that skips evenly spaced attentions and MLPs, equally many of each.

    It proposes one mask for each number of skipped sub-layers. The first mask skips half of the
    model.

    Neighbouring layers are similar, so a gap between two kept ones costs little acceptance.
    Attentions and MLPs are spaced separately, because an even spacing over the interleaved
    sub-layers would skip only one kind.

    Source: rule 1 of ASD (Metel et al. 2024); S3D, figure 4, alternate.
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        kinds = [
            [u for u, unit in enumerate(problem.units) if unit[0] % 2 == kind] for kind in (0, 1)
        ]
        n = len(problem.units)

        def spread(count: int) -> SkipMask:
            n_attn = (2 * count * len(kinds[0]) + n) // (2 * n)
            return problem.mask_of(
                [
                    units[k]
                    for units, share in zip(kinds, (n_attn, count - n_attn), strict=True)
                    for k in evenly_spaced(len(units), share)
                ]
            )

        return (spread(count) for count in coarse_to_fine(n))


def evenly_spaced(n: int, count: int) -> tuple[int, ...]:
    """Return `count` of 0..n-1 at equal distances, with equal margins at both ends."""
    return tuple((2 * k + 1) * n // (2 * count) for k in range(count))
