"""A draft policy: the settings that a search varies for a mask."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipsearch.core.recipe import Siblings
from skipsearch.drafters.exits.exit_base import Exit
from skipsearch.drafters.exits.fixed import Fixed


@dataclass(frozen=True)
class DraftPolicy:
    """The draft length, the exit policy and the siblings of a drafter."""

    draft_length: int  # the most tokens of a round
    exit: Exit = field(default_factory=Fixed)
    siblings: Siblings | None = None  # of tokens with low confidence; None: none

    def __str__(self) -> str:
        """Return a description such as `confidence 0.6, up to 8`."""
        siblings = f", {self.siblings}" if self.siblings else ""
        return f"{self.exit}, up to {self.draft_length}{siblings}"
