"""Drafters: where draft tokens come from. `recipe.DRAFTERS` lists them; `base.py` is the port."""

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
