"""What a search varies for a mask: draft length, exit policy and siblings."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipsearch.core.recipe import Siblings
from skipsearch.drafters.exits.exit_base import Exit
from skipsearch.drafters.exits.fixed import Fixed


@dataclass(frozen=True)
class DraftPolicy:
    """How long drafts are, and which of their tokens have siblings."""

    draft_length: int  # the most tokens of a round
    exit: Exit = field(default_factory=Fixed)
    siblings: Siblings | None = None  # verified next to unsure tokens; None: none

    def __str__(self) -> str:
        """`confidence 0.6, up to 8`"""
        beside = f", {self.siblings}" if self.siblings else ""
        return f"{self.exit}, up to {self.draft_length}{beside}"
