"""Bugs of draft heads that a checkpoint ships."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import Tensor

from skipsearch.drafters.mtp.shipped import ShippedHead
from skipsearch.models.generic.recurrent import RecurrentAdapter

from ..shipped_checks import check_shipped_drafts
from .register import caught_by


@caught_by(check_shipped_drafts)
def head_reads_states_before_the_final_norm() -> Iterator[None]:
    with patch.object(ShippedHead, "read_states", lambda self, hidden: hidden):
        yield


@caught_by(check_shipped_drafts)
def head_reads_the_token_of_its_state() -> Iterator[None]:
    """The embedding is that of the token before the right one."""
    real = ShippedHead.run

    def run(self: ShippedHead, hidden: Tensor, tokens: Tensor, *arguments: Any) -> Tensor:
        return real(self, hidden, tokens.roll(1, dims=1), *arguments)

    with patch.object(ShippedHead, "run", run):
        yield


@caught_by(check_shipped_drafts)
def states_of_replayed_tokens_stand_in_for_new_ones() -> Iterator[None]:
    """A recurrent model's pass shows the states of one row before."""
    real = RecurrentAdapter.run_with_hidden

    def run(self: RecurrentAdapter, *arguments: Any) -> tuple[Tensor, Tensor]:
        logits, hidden = real(self, *arguments)
        return logits, hidden.roll(1, dims=1)

    with patch.object(RecurrentAdapter, "run_with_hidden", run):
        yield
