"""`confidence`: stop when the draft's top probability falls under a fixed threshold."""

from __future__ import annotations

from typing import Any, ClassVar

from skipsearch.errors import DecodeError


class Confidence:
    """Source: Draft & Verify, section 3.4, with a static threshold (its Table 4); Kangaroo uses the same rule with η = 0.6."""

    kind: ClassVar[str] = "confidence"
    reads_confidence: ClassVar[bool] = True

    def __init__(self, threshold: float = 0.6):
        self.threshold = checked_share("threshold", threshold)

    def stop(self, confidence: float, n_drafted: int) -> bool:
        return confidence < self.threshold

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        pass

    def parameters(self) -> dict[str, Any]:
        return {"threshold": self.threshold}


def checked_share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise DecodeError(f"{name} is {value}; it is a probability and lies in 0..1")
    return float(value)
