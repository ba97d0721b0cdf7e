"""The trust region of a local model: a Hamming ball around the best mask.

The ball grows, shrinks and restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skipsearch.searchers.history import Observation

GROW_AFTER = 3  # improvements in a row
SHRINK_AFTER = 10  # masks inside the ball in a row that did not improve


@dataclass(frozen=True, slots=True)
class Region:
    """The masks that differ from `centre` in at most `radius` units.

    centre: None if there is no mask to centre on: none has a time yet, or each of them is in a ball
        that was given up.
    """

    centre: frozenset[int] | None
    radius: int


def trust_region(judged: Sequence[Observation], n_units: int) -> Region:
    """Return the trust region after these observations, which are in the order of their trials.

    The region depends on them alone, so a resumed search continues in it.
    A ball that keeps improving doubles, up to twice its first size, because predictions farther
    away are unreliable. A ball that does not improve is halved. If its radius falls below 1, the
    ball of the first size around its centre is given up (`closed`). The next ball starts around the
    best mask outside all of these. A better mask from outside moves the ball without resizing it.

    Source: TuRBO (Eriksson et al. 2019), in Hamming distance as in CASMOPOLITAN (Wan et al. 2021).
    """
    start = min(8, max(2, n_units // 4))
    radius, improved, stuck = start, 0, 0
    closed: list[frozenset[int]] = []
    best: Observation | None = None
    for n_known, latest in enumerate(judged, start=1):
        if _inside_any(latest.units, closed, start):
            continue
        if best is None:
            best = latest if latest.finite else None
            continue
        inside = len(latest.units ^ best.units) <= radius
        if latest.log_time < best.log_time:
            best = latest
            improved, stuck = (improved + 1, 0) if inside else (improved, stuck)
        elif inside:
            improved, stuck = 0, stuck + 1
        if improved == GROW_AFTER:
            radius, improved = min(2 * radius, 2 * start, n_units), 0
        if stuck == SHRINK_AFTER:
            radius, stuck = radius // 2, 0
        if not radius:
            closed.append(best.units)
            radius = start
            outside = [
                j for j in judged[:n_known] if j.finite and not _inside_any(j.units, closed, start)
            ]
            best = min(outside, key=lambda j: j.log_time, default=None)
    return Region(best.units if best else None, radius)


def _inside_any(units: frozenset[int], centres: Sequence[frozenset[int]], radius: int) -> bool:
    """Return whether a mask with these units is in a ball of this radius around any centre."""
    return any(len(units ^ centre) <= radius for centre in centres)
