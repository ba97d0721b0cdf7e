"""Bugs of drafts that read fewer bits or fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from skipsearch.decoding import loop
from skipsearch.drafters import DecodeContext
from skipsearch.drafters.reduced_session import HeadRowsSampler, ReducedSession
from skipsearch.drafters.skip.session import SkipSession
from skipsearch.models.head_rows import HeadRows

from ..reduced_checks import check_known_tokens, check_reduced_greedy, check_reduced_law
from .register import caught_by, planted


@caught_by(check_reduced_greedy)
def rounded_weights_verify() -> Iterator[None]:
    """The copy in fewer bits runs the verify passes too."""
    real_begin, real_round = ReducedSession.begin, loop.DecodeLoop._run_round

    def begin(self: ReducedSession, ctx: DecodeContext) -> None:
        ctx.model = self.reduced_model.model
        real_begin(self, ctx)

    def run_round(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        with patch.object(self, "model", request.ctx.model):
            return real_round(self, request, room)

    with (
        patch.object(ReducedSession, "begin", begin),
        patch.object(loop.DecodeLoop, "_run_round", run_round),
    ):
        yield


@planted(check_reduced_greedy, SkipSession, "draft")
def drafts_write_over_committed_kv(real, self, ctx, max_tokens):
    """The K/V of a drafted token are written to the slot before its own."""
    result, slot = real(self, ctx, max_tokens), ctx.cache.length
    for buffer in (*ctx.cache.keys, *ctx.cache.values):
        if buffer is not None and slot:
            buffer[:, :, slot - 1] = buffer[:, :, slot]
    return result


@caught_by(check_known_tokens)
def rows_of_the_head_are_taken_for_tokens() -> Iterator[None]:
    """A greedy choice is the number of a row. All text stays right, but few drafts are accepted."""
    with patch.object(HeadRows, "token_ids", property(lambda self: torch.arange(self.count))):
        yield


@caught_by(check_known_tokens)
def the_tokens_of_the_text_are_not_added() -> Iterator[None]:
    with patch.object(HeadRows, "add", lambda self, tokens: None):
        yield


@planted(check_reduced_law, HeadRowsSampler, "draw")
def q_is_of_other_tokens(real, self, scores):
    """The draft's distribution is reported for the wrong tokens."""
    tokens, probs = real(self, scores)
    return tokens, None if probs is None else probs.roll(1, dims=-1)
