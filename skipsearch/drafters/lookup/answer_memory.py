"""Earlier answers of a decoder, from which lookup can copy, so that similar requests get faster.

A decoder has such a memory only if its caller asks for one. The time of a request reveals what was
copied. A memory should therefore serve one user, or users who may know each other's text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

from skipsearch.drafters.lookup.suffix_index import Match, SuffixIndex

# Separator after each answer. No token has this id, so a match cannot extend into the next answer.
SEPARATOR = -1


class AnswerMemory:
    """The latest answers of a decoder, which any number of threads may read and add to.

    capacity: in tokens. If it is exceeded, the oldest answers are dropped."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._answers: deque[tuple[int, ...]] = deque()
        self._index = SuffixIndex()
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of indexed tokens.

        Old answers are dropped many at a time, so it may reach twice the capacity.
        """
        return len(self._index)

    def add(self, answer: Sequence[int]) -> None:
        """Add an answer. If it is longer than the capacity, only its end is stored."""
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
                # Concurrent readers keep the old index until their call ends.
                self._index = index

    def longest_match(
        self, history: Sequence[int], longer_than: int, max_tokens: int
    ) -> tuple[Match, list[int]] | None:
        """Return (the match, the tokens that followed it) in an answer; None if there is none.

        The match is the longest suffix of `history` that occurs in an answer, with more than
        `longer_than` tokens. At least 1 and at most `max_tokens` tokens are returned.
        """
        index = self._index
        match = index.longest_match_of(history)
        if match is None or match.length <= longer_than or match.position >= len(index):
            return None
        # Of an answer that another thread is adding, the index has the first tokens alone, and a
        # continuation beyond them would repeat them.
        followed = index.continuation(match.position, min(max_tokens, len(index) - match.position))
        if SEPARATOR in followed:
            followed = followed[: followed.index(SEPARATOR)]
        return (match, followed) if followed else None
