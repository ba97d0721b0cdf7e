"""Exit policies: when a round of drafting ends early.

A token that is drafted after a wrong one is wasted. So a drafter that drafts token by token asks its exit policy after each token, and ends
its draft where the policy says so. With `confidence` and a threshold of 0.6, a draft whose tokens had the probabilities 0.9, 0.8, 0.5 ends
with the third, which is still verified. `recipe.EXITS` lists them, a file each; `base.py` is the port.
"""

from __future__ import annotations

from skipsearch.exits.base import Exit, ExitSession, ThresholdSession
from skipsearch.exits.policy import DraftPolicy
from skipsearch.recipe import EXITS, make_exit

__all__ = ["EXITS", "DraftPolicy", "Exit", "ExitSession", "ThresholdSession", "make_exit"]
