"""`confidence`: ends a draft if its top probability is below a fixed threshold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from skipsearch.core.schema_types import Fraction
from skipsearch.drafters.exits.exit_base import Exit, ExitSession, first_below

if TYPE_CHECKING:
    import numpy as np


class Confidence(Exit):
    """Stops after a token whose top probability is below the threshold.

    Source: Draft & Verify, section 3.4, with a static threshold (its Table 4); Kangaroo uses the
    same rule with η = 0.6."""

    kind: Literal["confidence"] = "confidence"
    threshold: Fraction = Field(default=0.6, description="probability, 0..1")

    def begin(self) -> ExitSession:
        return self

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        return confidence < self.threshold

    def current_threshold(self) -> float:
        return self.threshold

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        pass

    def stop_lengths(self, confidence: np.ndarray) -> np.ndarray:
        return first_below(confidence, self.threshold)

    @classmethod
    def search_grid(cls, fine: bool) -> Iterable[Exit]:
        return [
            cls(threshold=round(t / 20, 2)) for t in (range(1, 20) if fine else range(2, 20, 2))
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.threshold:g}"
