"""A draft policy as a value: draft length, kind of exit and its parameters, before any of it has learnt anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skipsearch.exits.base import ExitPolicy


@dataclass(frozen=True)
class DraftPolicy:
    """draft_length: most tokens of a round. `make()` gives a fresh exit policy each time."""

    draft_length: int
    kind: str = "fixed"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> ExitPolicy:
        from skipsearch.exits import make_exit

        return make_exit(self.kind, **self.parameters)

    def __str__(self) -> str:
        """`confidence 0.6, up to 8`"""
        threshold = f" {self.parameters['threshold']:g}" if "threshold" in self.parameters else ""
        target = f" for {self.parameters['target_acceptance']:g}" if "target_acceptance" in self.parameters else ""
        return f"{self.kind}{threshold}{target}, up to {self.draft_length}"
