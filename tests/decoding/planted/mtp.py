"""Bugs of draft heads."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.drafters.mtp.session import MtpSession
from skipsearch.drafters.mtp.weights import TrainedHead
from skipsearch.models.kv_cache import KVCache, PassPlan

from ..mtp_checks import check_mtp_drafts
from .register import caught_by, planted


@planted(check_mtp_drafts, MtpSession, "committed")
def state_of_a_rejected_token(real, self, ctx, accepted_rows):
    """The head reads the first rows of a verify pass, rejected tokens included."""
    states = torch.cat(self._tapped, dim=1)
    self._unread.append(states[:, -1 - len(accepted_rows) :])
    self._tapped = []


@planted(check_mtp_drafts, MtpSession, "_take_committed")
def drafts_own_rows_stay(real, self, ctx):
    """The head's K/V of a draft, rejected tokens included, are taken for those of the text."""
    n_stale = min(max(0, self._n_drafted - 1), sum(t.shape[1] for t in self._unread) - 1)
    states = torch.cat(self._unread, dim=1)
    self._unread = [states[:, n_stale:]]
    self._n_read += n_stale
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


@planted(check_mtp_drafts, MtpSession, "_take_committed")
def token_of_another_step(real, self, ctx):
    """A row reads the embedding of its own token in place of the next one."""
    hidden, tokens, plan = real(self, ctx)
    return hidden, tokens.roll(1, dims=1), plan
