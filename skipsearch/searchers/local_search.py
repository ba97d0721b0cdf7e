"""`exchange`: flips and exchanges of the best mask known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skipsearch.searchers.greedy import Greedy, neighbours, observed_effects
from skipsearch.searchers.history import Observation


class LocalSearch(Greedy):
    """A searcher that runs only the second phase of `greedy`: flips and exchanges.

    A flip adds a unit to the skipped ones of the best mask or removes one. An exchange does both.
    LocalSearch starts from the best mask of any searcher and moves to each better mask. The effects
    of measured flips decide which pairs come first. Without trials, it begins with the mask that
    skips the half of the units that does least harm alone.

    Source: forward-backward exchange of feature selection (Pudil et al. 1994).
    """

    def _walk(self, judged: Sequence[Observation]) -> Iterator[frozenset[int]]:
        n, harm = len(self._problem.units), self._single_skip_log_times()
        if (best := self._history.best()) is None:
            yield frozenset(sorted(range(n), key=lambda u: (harm.get(u, 0.0), u))[: max(1, n // 2)])
            best_units = frozenset[int]()
        else:
            best_units = best.units
        yield from neighbours(best_units, n, harm | observed_effects(judged))
