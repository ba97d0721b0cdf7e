"""Find where a generation repeats itself: its first repeated n-gram, or a loop at its end.

If a model loops, every draft is accepted, so looping text makes every mask look good. Tasks
therefore end an answer at a loop (`end_on_repeat: loop`), and measurements count the text before
the loop only. A repeated n-gram is no loop: it is ordinary in code, tables and lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np

MAX_PERIOD = 64  # tokens of the longest period that counts as a loop
MIN_REPETITIONS = 3
MIN_LOOP_TOKENS = 48  # all repetitions together

EndOnRepeat = int | Literal["loop"] | None  # length of an n-gram, a loop, or never


class RepeatDetector:
    """A detector of the first repeated n-gram, which reads generated tokens one by one.

    Occurrences may overlap: seven equal tokens repeat their 6-gram. Raises: ValueError if n < 1.
    """

    reason = "repeat"

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


class LoopDetector:
    """A detector of a loop at the end of a text, which reads generated tokens one by one.

    A text loops if its last tokens are at least MIN_REPETITIONS repetitions of one period of at
    most MAX_PERIOD tokens, and at least MIN_LOOP_TOKENS tokens in all.
    """

    reason = "loop"

    def __init__(self) -> None:
        self._n_tokens = 0
        # Entry p - 1 belongs to period p.
        self._latest = np.full(MAX_PERIOD, -1, dtype=np.int64)  # the token p places earlier
        self._n_equal = np.zeros(MAX_PERIOD, dtype=np.int64)  # last tokens equal to that one
        self._periods = np.arange(1, MAX_PERIOD + 1)
        self._needed = np.maximum(MIN_REPETITIONS * self._periods, MIN_LOOP_TOKENS) - self._periods

    def push_token(self, token: int) -> bool:
        """Add a token and return whether the text now ends in a loop."""
        self._n_equal = np.where(self._latest == token, self._n_equal + 1, 0)
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token
        self._n_tokens += 1
        return bool((self._n_equal >= self._needed).any())

    @property
    def loop_start(self) -> int | None:
        """The number of tokens before the loop; None if the text does not end in one."""
        looping = np.flatnonzero(self._n_equal >= self._needed)
        if not len(looping):
            return None
        period = looping[0]
        return self._n_tokens - int(self._n_equal[period] + self._periods[period])


def make_detector(end_on_repeat: EndOnRepeat) -> RepeatDetector | LoopDetector | None:
    """Return the detector of a setting; None if a generation ends at no repetition."""
    if end_on_repeat == "loop":
        return LoopDetector()
    return RepeatDetector(int(end_on_repeat)) if end_on_repeat else None


def find_loop_start(tokens: Iterable[int]) -> int | None:
    """Return the number of tokens before the first loop of a text; None if it has none."""
    detector = LoopDetector()
    return next((detector.loop_start for token in tokens if detector.push_token(token)), None)
