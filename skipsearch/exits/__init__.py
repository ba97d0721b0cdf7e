"""Exit policies: when a round of drafting ends early. `recipe.EXITS` lists them; `base.py` is the port."""

from __future__ import annotations

from skipsearch.exits.base import Exit, ExitSession
from skipsearch.exits.policy import DraftPolicy
from skipsearch.recipe import EXITS, make_exit

__all__ = ["EXITS", "DraftPolicy", "Exit", "ExitSession", "make_exit"]
