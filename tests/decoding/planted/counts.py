"""Bugs of drafting and counting."""

from __future__ import annotations

import torch

from skipsearch.decoding import loop
from skipsearch.drafters import Draft
from skipsearch.drafters.skip.session import SkipSession
from skipsearch.engine import forward

from ..count_checks import check_counts
from .register import planted


@planted(check_counts, SkipSession, "draft")
def low_confidence_token_dropped_instead_of_verified(real, self, ctx, most):
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


@planted(check_counts, SkipSession, "verified")
def policy_told_that_the_bonus_was_accepted(real, self, ctx, path):
    self.exit_session.observe(len(path) + 1, self._n_drafted)


@planted(check_counts, SkipSession, "verified")
def policy_told_the_draft_length_instead_of_the_draft(real, self, ctx, path):
    self.exit_session.observe(len(path), 4)


@planted(check_counts, loop.DecodeLoop, "_run_round")
def bonus_counted_as_accepted(real, self, request, room):
    request.stats.accepted += 1
    return real(self, request, room)
