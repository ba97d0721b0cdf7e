"""Drafters: where draft tokens come from.

A recipe is an ordered list of drafters. In every round they are asked in turn, and the first that
proposes something drafts. So

    Recipe((Lookup(draft_length=8, min_match=2), Skip.from_mask(mask, 5, exit)))

copies up to 8 tokens if the last two occurred earlier in the text. Otherwise the model drafts up to
5 tokens without the sub-layers of the mask. `recipe.DRAFTERS` lists the drafters, one folder each;
`base.py` is the port, with a whole drafter as an example."""

from __future__ import annotations

from skipsearch.core.recipe import DRAFTERS
from skipsearch.drafters.base import (
    DecodeContext,
    Draft,
    Drafter,
    DraftSession,
    PartialPass,
    StatefulDrafter,
)

__all__ = [
    "DRAFTERS",
    "DecodeContext",
    "Draft",
    "DraftSession",
    "Drafter",
    "PartialPass",
    "StatefulDrafter",
]
