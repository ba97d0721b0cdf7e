"""Answers that a decoder gave earlier, for lookup to copy from: requests that resemble one another then speed each other up.

A decoder has such a memory only where its caller asks for one. What is copied shows in the time that a request takes, so a memory belongs
to one user, or to users who may know each other's text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

from skipsearch.drafters.suffixes import Match, SuffixIndex

BETWEEN = -1   # stands behind each answer; no token has this id, so no match reaches from one answer into the next


class Memory:
    """Any number of threads may read it and add to it. capacity: tokens; where it is full the oldest answers go."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._answers: deque[tuple[int, ...]] = deque()
        self._index = SuffixIndex()
        self._lock = Lock()

    def __len__(self) -> int:
        """Tokens that it can be asked for: up to twice the capacity, since old answers go many at a time."""
        return len(self._index)

    def add(self, answer: Sequence[int]) -> None:
        """What one request was answered. Of a longer answer than the memory holds, the end."""
        with self._lock:
            self._answers.append((*answer[-self.capacity:], BETWEEN))
            self._index.extend(self._answers[-1])
            if len(self._index) > 2 * self.capacity:
                total = sum(map(len, self._answers))
                while total > self.capacity + 1:
                    total -= len(self._answers.popleft())
                index = SuffixIndex()
                for kept in self._answers:
                    index.extend(kept)
                self._index = index   # readers hold the old one to the end of their question

    def match(self, history: Sequence[int], longer_than: int, most: int) -> tuple[Match, list[int]] | None:
        """The longest end of a text that stands in an answer, if it has more than `longer_than` tokens, and what followed it there, 1 to
        `most` tokens."""
        index = self._index
        found = index.find(history)
        if found is None or found.length <= longer_than:
            return None
        followed = index.follow(found.position, most) if found.position < len(index) else []
        if BETWEEN in followed:
            followed = followed[:followed.index(BETWEEN)]
        return (found, followed) if followed else None
