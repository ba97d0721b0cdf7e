"""Exit policies, which end a draft before its draft length.

Tokens that are drafted after a wrong one are wasted. A drafter that drafts token by token therefore
asks its exit policy after each token whether to stop. With `confidence` and a threshold of 0.6, a
draft whose tokens have the probabilities 0.9, 0.8, 0.5 ends with the third token, which is still
verified. `recipe.EXITS` lists the policies, one file each; `exit_base.py` has the interface.
"""

from __future__ import annotations

from skipsearch.core.recipe import EXITS, make_exit
from skipsearch.drafters.exits.draft_policy import DraftPolicy
from skipsearch.drafters.exits.exit_base import Exit, ExitSession, ThresholdExitSession

__all__ = ["EXITS", "DraftPolicy", "Exit", "ExitSession", "ThresholdExitSession", "make_exit"]
