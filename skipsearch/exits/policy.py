"""A draft policy as a value: draft length, exit and siblings, what a search varies for a mask."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipsearch.exits.base import Exit
from skipsearch.exits.fixed import Fixed
from skipsearch.recipe import Siblings


@dataclass(frozen=True)
class DraftPolicy:
    """draft_length: most tokens of a round. siblings: verified beside unsure tokens; None: none are."""

    draft_length: int
    exit: Exit = field(default_factory=Fixed)
    siblings: Siblings | None = None

    def __str__(self) -> str:
        """`confidence 0.6, up to 8`"""
        beside = f", {self.siblings}" if self.siblings else ""
        return f"{self.exit}, up to {self.draft_length}{beside}"
