"""How much a server takes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """running: requests that are decoded side by side, a round of each in turn. waiting: requests that may wait behind them.

    body: bytes of a request. seconds: of decoding one request, after which its answer ends as at its limit of tokens. reading: seconds
    that the body of a request may take to arrive. prefixes: texts whose K/V is kept for later requests of the same key. together: run the
    passes of running requests as one instead of in turn.
    """

    running: int = 4
    waiting: int = 64
    body: int = 2**21
    seconds: float = 600.0
    reading: float = 30.0
    prefixes: int = 16
    together: bool = False
