"""Find the position at which a generation begins to repeat itself: its first repeated n-gram.

If a model loops, every draft is accepted, so text after this position makes every mask look good.
Tasks end a generation at this position (`end_on_repeat`), both in replay and in timed runs.
Occurrences may overlap: seven equal tokens repeat their 6-gram.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class RepeatDetector:
    """A detector of the first repeated n-gram, which reads generated tokens one by one.

    Raises: ValueError if n < 1.
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"n is {n}; an n-gram has at least one token")
        self._n = n
        self._window: deque[int] = deque(maxlen=n)
        self._seen_ngrams: set[tuple[int, ...]] = set()

    def push_token(self, token: int) -> bool:
        """Add a token and return whether the n-gram that it completes occurred before."""
        self._window.append(token)
        if len(self._window) < self._n:
            return False
        gram = tuple(self._window)
        if gram in self._seen_ngrams:
            return True
        self._seen_ngrams.add(gram)
        return False


def find_first_repeat(tokens: Iterable[int], n: int) -> int | None:
    """Return the number of tokens up to the end of the first repeated n-gram; None without one."""
    detector = RepeatDetector(n)
    return next(
        (end for end, token in enumerate(tokens, start=1) if detector.push_token(token)), None
    )
