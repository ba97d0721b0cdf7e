"""Bugs of draft heads that a checkpoint ships."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

from skipsearch.drafters.mtp.shipped import ShippedHead
from skipsearch.models.generic.recurrent import RecurrentAdapter

from ..shipped_checks import check_shipped_drafts
from .register import caught_by, planted


@caught_by(check_shipped_drafts)
def head_reads_states_before_the_final_norm() -> Iterator[None]:
    with patch.object(ShippedHead, "read_states", lambda self, hidden: hidden):
        yield


@planted(check_shipped_drafts, ShippedHead, "run")
def head_reads_the_token_of_its_state(real, self, hidden, tokens, *arguments):
    """The embedding is that of the token before the right one."""
    return real(self, hidden, tokens.roll(1, dims=1), *arguments)


@planted(check_shipped_drafts, RecurrentAdapter, "run_with_hidden")
def states_of_replayed_tokens_stand_in_for_new_ones(real, self, *arguments):
    """A recurrent model's pass shows the states of one row before."""
    logits, hidden = real(self, *arguments)
    return logits, hidden.roll(1, dims=1)
