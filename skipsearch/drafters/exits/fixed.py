"""`fixed`: never ends a draft early."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from skipsearch.drafters.exits.exit_base import Exit, ExitSession

if TYPE_CHECKING:
    import numpy as np


class Fixed(Exit):
    """Never stops: every round drafts `draft_length` tokens."""

    kind: Literal["fixed"] = "fixed"
    reads_confidence: ClassVar[bool] = False

    def begin(self) -> ExitSession:
        return self

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        return False

    def current_threshold(self) -> float:
        return 0.0

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        pass

    def stop_lengths(self, confidence: np.ndarray) -> np.ndarray:
        import numpy as np

        return np.full(len(confidence), confidence.shape[1])

    @classmethod
    def search_grid(cls, fine: bool) -> Iterable[Exit]:
        return [cls()]

    def __str__(self) -> str:
        return self.kind
