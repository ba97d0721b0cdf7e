"""Bugs of drafting and counting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from skipsearch.decoding import loop
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.skip.session import SkipSession
from skipsearch.engine import forward

from ..count_checks import check_counts
from .register import caught_by


@caught_by(check_counts)
def low_confidence_token_dropped_instead_of_verified() -> Iterator[None]:
    def draft(self: SkipSession, ctx: DecodeContext, most: int) -> Draft | None:
        token, tokens = ctx.pending, [ctx.pending[:, :0]]
        for n in range(most):
            plan = ctx.planner.plan_chain(ctx.cache.length + n, 1)
            logits = forward(ctx.model, token, ctx.cache, plan, self.mask)[:, -1]
            scored = ctx.sampler.score(logits, with_confidence=True)
            token, _ = ctx.sampler.draw(scored)
            assert scored.confidence is not None
            if self.exit_session.should_stop(float(scored.confidence), n + 1):
                break
            tokens.append(token)
        self._n_drafted = len(tokens) - 1
        return Draft(torch.cat(tokens, dim=1)[0]) if self._n_drafted else None

    with patch.object(SkipSession, "draft", draft):
        yield


@caught_by(check_counts)
def policy_told_that_the_bonus_was_accepted() -> Iterator[None]:
    def verified(self: SkipSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.exit_session.observe(len(path) + 1, self._n_drafted)

    with patch.object(SkipSession, "verified", verified):
        yield


@caught_by(check_counts)
def policy_told_the_draft_length_instead_of_the_draft() -> Iterator[None]:
    def verified(self: SkipSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.exit_session.observe(len(path), 4)

    with patch.object(SkipSession, "verified", verified):
        yield


@caught_by(check_counts)
def bonus_counted_as_accepted() -> Iterator[None]:
    real = loop.DecodeLoop._run_round

    def counted(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        request.stats.accepted += 1
        return real(self, request, room)

    with patch.object(loop.DecodeLoop, "_run_round", counted):
        yield
