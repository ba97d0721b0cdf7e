"""Counts of each round, for tests that see a decoder only through its callers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from skipsearch.decoding import loop


@contextmanager
def counted(counter: str) -> Iterator[list[int]]:
    """Collect what each round of any request adds to `counter` of `DecodeStats`."""
    gained: list[int] = []
    real = loop.DecodeLoop._run_round

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        before = getattr(request.stats, counter)
        tokens = real(self, request, room)
        gained.append(getattr(request.stats, counter) - before)
        return tokens

    with patch.object(loop.DecodeLoop, "_run_round", rounds):
        yield gained
