"""A draft policy as a value: draft length and exit, what a search varies for a mask."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipsearch.exits.base import Exit
from skipsearch.exits.fixed import Fixed


@dataclass(frozen=True)
class DraftPolicy:
    """draft_length: most tokens of a round."""

    draft_length: int
    exit: Exit = field(default_factory=Fixed)

    def __str__(self) -> str:
        """`confidence 0.6, up to 8`"""
        return f"{self.exit}, up to {self.draft_length}"
