"""Bugs of draft heads."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.drafters.mtp.session import MtpSession
from skipsearch.drafters.mtp.weights import TrainedHead
from skipsearch.models.kv_cache import KVCache, PassPlan

from ..mtp_checks import check_mtp_drafts, check_mtp_turns
from .register import caught_by, planted


@planted(check_mtp_drafts, MtpSession, "committed")
def state_of_a_rejected_token(real, self, ctx, accepted_rows):
    """The head reads the first rows of a verify pass, rejected tokens included."""
    states = torch.cat(self._tapped, dim=1)
    self._add_unread(ctx, states[:, -1 - len(accepted_rows) :])
    self._tapped = []


@planted(check_mtp_drafts, MtpSession, "_take_unread")
def drafts_own_rows_stay(real, self, ctx):
    """The head's K/V of a draft, rejected tokens included, are taken for those of the text."""
    (first, states), *later = self.text.unread
    n_stale = min(max(0, self._n_drafted - 1), states.shape[1] - (not later))
    self.text.unread = [(first + n_stale, states[:, n_stale:]), *later]
    self.text.row_ends += range(first + 2, first + 2 + n_stale)
    return real(self, ctx)


@caught_by(check_mtp_drafts)
def state_of_another_step() -> Iterator[None]:
    """Every step of a draft reads the full model's state, and none that of the step before."""
    real = TrainedHead.run
    output = full_state = torch.empty(0)

    def run(
        self: TrainedHead, hidden: Tensor, tokens: Tensor, cache: KVCache, plan: PassPlan
    ) -> Tensor:
        nonlocal output, full_state
        if hidden.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
            hidden = full_state
        full_state = hidden[:, -1:]
        output = real(self, hidden, tokens, cache, plan)
        return output

    with patch.object(TrainedHead, "run", run):
        yield


@planted(check_mtp_drafts, MtpSession, "_take_unread")
def token_of_another_step(real, self, ctx):
    """A row reads the embedding of its own token in place of the next one."""
    hidden, tokens, plan = real(self, ctx)
    return hidden, tokens.roll(1, dims=1), plan


@planted(check_mtp_turns, MtpSession, "begin")
def text_begins_at_each_turn(real, self, ctx):
    """A turn's first row follows no row of the text before it."""
    ctx.cache.companions.clear()
    return real(self, ctx)


@planted(check_mtp_turns, MtpSession, "begin")
def states_of_the_last_turn_are_lost(real, self, ctx):
    """The states that no draft of the last turn read are forgotten at its end."""
    for text in ctx.cache.companions.values():
        text.unread = []
    return real(self, ctx)
