"""Searchers that know their masks beforehand: they propose a list, best first, and end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers.base import SearchProblem


class FixedOrderSearcher(ABC):
    """A searcher that proposes the masks of a list in order, except judged and pending ones.

    If a worker dies, its pending mask is never told. The mask is proposed again when it is no
    longer pending.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._source = self.list_masks(problem)
        self._drawn: set[SkipMask] = set()
        self._judged: set[SkipMask] = set()
        self._unjudged: list[SkipMask] = []  # drawn from the source, not judged yet

    @abstractmethod
    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        """Return the list of masks, best first.

        The list may contain repetitions and the empty mask, which `ask` leaves out.

        Raises: SearchError if evidence is missing. It is raised by this call, not by the first
        `next`.
        """

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        taken = set(pending)
        self._unjudged = [mask for mask in self._unjudged if mask not in self._judged]
        for mask in self._unjudged:
            if mask not in taken:
                return mask
        for mask in self._source:
            if mask in self._drawn or not mask.n_skipped:
                continue
            self._drawn.add(mask)
            if mask in self._judged:
                continue
            self._unjudged.append(mask)
            if mask not in taken:
                return mask
        return None

    def tell(self, trial: Trial) -> None:
        self._judged.add(trial.mask)


def coarse_to_fine(n: int) -> tuple[int, ...]:
    """Return each of 1..n once: the middle first, then the quarters, …

    So a search that is cut short has still covered the whole range.
    """
    halvings = [
        round(n * odd / 2**level)
        for level in range(1, n.bit_length() + 1)
        for odd in range(1, 2**level, 2)
    ]
    return tuple(dict.fromkeys(count for count in (*halvings, *range(1, n + 1)) if count))
