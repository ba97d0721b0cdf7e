"""The exit-policy port: when to stop drafting before the draft length is reached."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol


class ExitPolicy(Protocol):
    """Decides after each drafted token whether it is the last of its round; that token is verified all the same.

    reads_confidence: False spares reading a number off the device at every draft step.
    A policy may learn (`observe`), and what it learnt lives on across requests.
    """

    kind: ClassVar[str]
    reads_confidence: ClassVar[bool]

    def stop(self, confidence: float, n_drafted: int) -> bool:
        """confidence: top probability of the draft at its latest token; n_drafted: tokens drafted in this round so far."""

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        """Told after each verify pass of a round that drafted something."""

    def parameters(self) -> dict[str, Any]:
        """What a profile stores to build it again, in its initial state."""
