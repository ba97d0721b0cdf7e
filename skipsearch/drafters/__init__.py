"""Drafters propose draft tokens.

A recipe is an ordered list of drafters. Each round asks them in order, and the first drafter that
proposes anything drafts. For example,

    Recipe((Lookup(draft_length=8, min_match=2), Skip.from_mask(mask, 5, exit)))

copies up to 8 tokens if the last two occurred earlier in the text. Otherwise the model drafts up to
5 tokens without the sub-layers of the mask. `recipe.DRAFTERS` lists the drafters; each has a
folder. `base.py` has the interface, with a complete drafter as an example.
"""

from __future__ import annotations

from skipsearch.core.recipe import DRAFTERS
from skipsearch.drafters.base import (
    DecodeContext,
    Draft,
    Drafter,
    DraftSession,
    LearningDrafter,
    PartialPass,
)

__all__ = [
    "DRAFTERS",
    "DecodeContext",
    "Draft",
    "DraftSession",
    "Drafter",
    "LearningDrafter",
    "PartialPass",
]
