"""Earlier answers of a decoder, for lookup to copy from. Similar requests then speed each other up.

A decoder has such a memory only if its caller asks for one. The time of a request reveals what was
copied, so a memory belongs to one user, or to users who may know each other's text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

from skipsearch.drafters.lookup.suffix_index import Match, SuffixIndex

# Ends each answer. No token has this id, so no match extends from one answer into the next.
SEPARATOR = -1


class AnswerMemory:
    """The latest answers of a decoder, which any number of threads may read and add to.

    capacity: tokens; the oldest answers are dropped beyond it."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._answers: deque[tuple[int, ...]] = deque()
        self._index = SuffixIndex()
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of indexed tokens: up to twice the capacity, since old answers are
        dropped many at a time.
        """
        return len(self._index)

    def add(self, answer: Sequence[int]) -> None:
        """Add an answer; of one that is longer than the capacity, the end."""
        with self._lock:
            self._answers.append((*answer[-self.capacity :], SEPARATOR))
            self._index.extend(self._answers[-1])
            if len(self._index) > 2 * self.capacity:
                total = sum(map(len, self._answers))
                while total > self.capacity + 1:
                    total -= len(self._answers.popleft())
                index = SuffixIndex()
                for remembered in self._answers:
                    index.extend(remembered)
                # Readers use the old index to the end of their call.
                self._index = index

    def longest_match(
        self, history: Sequence[int], longer_than: int, max_tokens: int
    ) -> tuple[Match, list[int]] | None:
        """Return the longest suffix of a text that occurs in an answer, and the 1 to `max_tokens`
        tokens that followed it there.

        None if the suffix has no more than `longer_than` tokens, or nothing followed it."""
        index = self._index
        match = index.longest_match_of(history)
        if match is None or match.length <= longer_than or match.position >= len(index):
            return None
        followed = index.continuation(match.position, max_tokens)
        if SEPARATOR in followed:
            followed = followed[: followed.index(SEPARATOR)]
        return (match, followed) if followed else None
