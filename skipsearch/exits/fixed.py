"""`fixed`: every round drafts as many tokens as it may."""

from __future__ import annotations

from typing import Any, ClassVar


class Fixed:
    kind: ClassVar[str] = "fixed"
    reads_confidence: ClassVar[bool] = False

    def stop(self, confidence: float, n_drafted: int) -> bool:
        return False

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        pass

    def parameters(self) -> dict[str, Any]:
        return {}
