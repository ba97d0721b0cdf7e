"""Where a generation starts to repeat itself: its first n-gram that stood in it before.

A model that loops makes every draft right, so text behind that point flatters any mask. Tasks end a generation there
(`end_on_repeat`), and replay and wall clock do it alike. Occurrences may overlap: seven equal tokens repeat their 6-gram.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class RepeatDetector:
    """Watches generated tokens one by one. A push costs one tuple of n tokens, however long the generation is.

    Raises: ValueError if n < 1.
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"n is {n}; an n-gram has at least one token")
        self._n = n
        self._last: deque[int] = deque(maxlen=n)
        self._seen: set[tuple[int, ...]] = set()

    def push(self, token: int) -> bool:
        """Whether the n-gram that this token completes occurred before."""
        self._last.append(token)
        if len(self._last) < self._n:
            return False
        gram = tuple(self._last)
        if gram in self._seen:
            return True
        self._seen.add(gram)
        return False


def first_repeat(tokens: Iterable[int], n: int) -> int | None:
    """How many of the generated tokens lie before the end of the first repeated n-gram, itself included; None if none repeats."""
    detector = RepeatDetector(n)
    return next((end for end, token in enumerate(tokens, start=1) if detector.push(token)), None)
