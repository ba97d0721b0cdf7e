"""Drafters: where draft tokens come from.

A recipe is an ordered list of drafters. In every round they are asked in turn, and the first that proposes something drafts. So

    Recipe((Lookup(draft_length=8, min_match=2), Skip.of(mask, 5, exit)))

copies up to 8 tokens where the last two stood in the text before, and lets the thinned model draft up to 5 elsewhere.
`recipe.DRAFTERS` lists them, a file each; `base.py` is the port, with a whole drafter as an example.
"""

from __future__ import annotations

from skipsearch.drafters.base import (
    DecodeContext,
    Draft,
    Drafter,
    DraftSession,
    LearningDrafter,
    Resume,
    WatchingDrafter,
    WatchingSession,
)
from skipsearch.recipe import DRAFTERS

__all__ = ["DRAFTERS", "DecodeContext", "Draft", "DraftSession", "Drafter", "LearningDrafter", "Resume", "WatchingDrafter",
           "WatchingSession"]
