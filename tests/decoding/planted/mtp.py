"""Bugs of draft heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.drafters import DecodeContext
from skipsearch.drafters.mtp.session import MtpSession

from ..mtp_checks import check_mtp_drafts
from .register import caught_by


@caught_by(check_mtp_drafts)
def state_of_a_rejected_token() -> Iterator[None]:
    """The head reads the first rows of a verify pass, rejected tokens included."""

    def committed(self: MtpSession, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        states = torch.cat(self._tapped, dim=1)
        self._unread.append(states[:, -1 - len(accepted_rows) :])
        self._tapped = []

    with patch.object(MtpSession, "committed", committed):
        yield


@caught_by(check_mtp_drafts)
def drafts_own_rows_stay() -> Iterator[None]:
    """The head's K/V of a draft, rejected tokens included, are taken for those of the text."""
    real = MtpSession._read_committed

    def read(self: MtpSession, ctx: DecodeContext) -> Tensor:
        n_stale = min(max(0, self._n_drafted - 1), sum(t.shape[1] for t in self._unread) - 1)
        states = torch.cat(self._unread, dim=1)
        self._unread = [states[:, n_stale:]]
        self._n_read += n_stale
        return real(self, ctx)

    with patch.object(MtpSession, "_read_committed", read):
        yield


@caught_by(check_mtp_drafts)
def state_of_another_step() -> Iterator[None]:
    """Every step of a draft reads the full model's state, and none that of the step before."""
    real = MtpSession._run_rows

    def run(
        self: MtpSession, ctx: DecodeContext, hidden: Tensor, tokens: Tensor, slot: int
    ) -> Tensor:
        if slot == self._n_read and slot > 0 and self._unread == [] and hidden.shape[1] == 1:
            hidden = getattr(self, "_first_state", hidden)
        self._first_state = hidden[:, -1:]
        return real(self, ctx, hidden, tokens, slot)

    with patch.object(MtpSession, "_run_rows", run):
        yield


@caught_by(check_mtp_drafts)
def token_of_another_step() -> Iterator[None]:
    """A row reads the embedding of its own token in place of the next one."""
    real = MtpSession._run_rows

    def run(
        self: MtpSession, ctx: DecodeContext, hidden: Tensor, tokens: Tensor, slot: int
    ) -> Tensor:
        if hidden.shape[1] > 1:
            tokens = tokens.roll(1, dims=1)
        return real(self, ctx, hidden, tokens, slot)

    with patch.object(MtpSession, "_run_rows", run):
        yield
