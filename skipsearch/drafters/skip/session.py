"""Draft with the model itself, without the sub-layers of a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Siblings
from skipsearch.drafters.base import DecodeContext, Draft, DraftSession
from skipsearch.drafters.exits import Exit, ThresholdExitSession
from skipsearch.engine import draft_chain, draft_step, forward
from skipsearch.engine.sampler import TokenSampler
from skipsearch.models.adapter import DraftScores


class SiblingRule(Protocol):
    """A rule that decides which tokens have siblings. `Siblings` is one such rule."""

    @property
    def most(self) -> int:
        """The most siblings of one token."""

    def count_for(self, confidence: float) -> int:
        """Return the number of siblings of a token with this top probability."""


class SkipDrafter:
    """A drafter that runs the model under a fixed mask.

    Source: Draft & Verify, section 3.2, and section 3.4 for the exit policies.
    """

    def __init__(self, mask: SkipMask, exit_policy: Exit, siblings: Siblings | None = None):
        self.mask, self.exit, self.siblings = mask, SharedExit(exit_policy), siblings

    def new_session(self) -> SkipSession:
        return SkipSession(self.mask, self.exit, self.siblings)


class SharedExit:
    """A wrapper of an exit policy that gives each request its exit session.

    If `policy.shared_across_requests`, all requests get the same session. Otherwise each gets its
    own.
    """

    def __init__(self, policy: Exit):
        self.policy = policy
        self._shared = policy.begin() if policy.shared_across_requests else None

    def begin(self) -> Any:
        """Return the exit session of a new request."""
        return self._shared or self.policy.begin()


class TokenwiseSession(DraftSession):
    """A session that drafts token by token, until the exit policy ends the draft.

    A subclass defines `draft`, which says how a token is scored.
    """

    def __init__(self, exit_policy: SharedExit, siblings: SiblingRule | None):
        self.exit_session, self.siblings = exit_policy.begin(), siblings
        self.reads_confidence = exit_policy.policy.reads_confidence
        self._has_threshold = isinstance(self.exit_session, ThresholdExitSession)
        self._n_drafted = 0  # length of the latest main path

    def _draft_tokens(
        self,
        ctx: DecodeContext,
        max_tokens: int,
        score_token: Callable[[Tensor, int, TokenSampler, bool], DraftScores],
        score_chain: Callable[[TokenSampler, float], DraftScores | None] | None = None,
    ) -> Draft:
        """Return the draft of up to `max_tokens` tokens.

        score_token: scores draft token n, from 0, after a token [1, 1] (the first one after all of
        `ctx.pending`), for a sampler, with or without the confidence. score_chain: scores all
        tokens up to the first one below a threshold in one call of the engine. It returns None if
        the engine has no such call. It is not called
        if the exit policy must be asked after each token."""
        sampler = ctx.sampler if self.siblings is None else ctx.sampler.top(1 + self.siblings.most)
        threshold = self.exit_session.current_threshold() if self._has_threshold else None
        if threshold is not None and score_chain is not None:
            scores = score_chain(sampler, threshold)
            if scores is not None:
                draft = build_chain_draft(scores, self.siblings)
                self._n_drafted = len(draft.main_path().tokens)
                return draft
        with_confidence = self.reads_confidence or self.siblings is not None
        token = ctx.pending
        tokens, probs, n_siblings = list[Tensor](), list[Tensor](), list[int]()
        for n in range(max_tokens):
            scores = score_token(token, n, sampler, with_confidence)
            ranked, q = sampler.draw(scores)  # [1, 1 + siblings]
            token = ranked[:, :1]
            tokens.append(ranked)
            n_siblings.append(0)
            if q is not None:
                probs.append(q)
            if scores.confidence is None:
                continue
            confidence = float(scores.confidence)
            if self.siblings:
                n_siblings[-1] = self.siblings.count_for(confidence)
            if (
                n + 1 < max_tokens
                and self.reads_confidence
                and self.exit_session.should_stop(confidence, n + 1)
            ):
                break
        self._n_drafted = len(tokens)
        return build_draft(torch.cat(tokens), torch.cat(probs) if probs else None, n_siblings)

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        n_accepted = sum(node <= self._n_drafted for node in accepted_nodes)
        self.exit_session.observe(n_accepted, self._n_drafted)


class SkipSession(TokenwiseSession):
    """A session that drafts one request under a mask. The mask may be replaced between rounds."""

    def __init__(self, mask: SkipMask, exit_policy: SharedExit, siblings: SiblingRule | None):
        super().__init__(exit_policy, siblings)
        self.mask = mask

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        model, cache, planner = ctx.model, ctx.cache, ctx.planner
        n_unread = ctx.pending.shape[1]

        def score_token(
            token: Tensor, n: int, sampler: TokenSampler, with_confidence: bool
        ) -> DraftScores:
            if n == 0 and n_unread > 1:
                plan = planner.plan_chain(cache.length, n_unread)
                logits = forward(model, token, cache, plan, self.mask, last_only=True)
                return sampler.score(logits[:, -1], with_confidence)
            plan = planner.plan_chain(cache.length + n_unread - 1 + n, 1)
            return draft_step(model, token, cache, plan, self.mask, sampler, with_confidence)

        def score_chain(sampler: TokenSampler, threshold: float) -> DraftScores | None:
            return draft_chain(
                model, ctx.pending, cache, planner, self.mask, sampler, max_tokens, threshold
            )

        return self._draft_tokens(ctx, max_tokens, score_token, score_chain)

    def continue_draft(
        self, ctx: DecodeContext, tokens: Sequence[int], max_tokens: int
    ) -> Draft | None:
        if ctx.model.spec.is_recurrent:  # the state after tokens cannot be taken back
            return None
        rows = torch.cat([ctx.pending, ctx.pending.new_tensor([tokens])], dim=1)
        n_before, n_read = ctx.cache.length, len(tokens)
        plan = ctx.planner.plan_chain(n_before, n_read)
        forward(ctx.model, rows[:, :-1], ctx.cache, plan, self.mask, last_only=True)
        n_drafted = self._n_drafted
        try:
            ctx.cache.length += n_read
            draft = self.draft(replace(ctx, pending=rows[:, -1:]), max_tokens)
        finally:
            ctx.cache.length, self._n_drafted = n_before, n_drafted
        return None if draft is None else draft.main_path()


def build_chain_draft(scores: DraftScores, siblings: SiblingRule | None) -> Draft:
    """Return the draft of the steps that one call of the engine made."""
    assert scores.choice is not None
    n_siblings = list[int]()
    if siblings is not None and scores.confidence is not None:
        n_siblings = [siblings.count_for(c) for c in scores.confidence.tolist()]
    return build_draft(scores.choice, scores.probs, n_siblings)


def build_draft(ranked_tokens: Tensor, probs: Tensor | None, n_siblings: Sequence[int]) -> Draft:
    """Return a chain, or a tree if any token has siblings. Arguments are as for `add_siblings`."""
    if any(n_siblings):
        return add_siblings(ranked_tokens, probs, n_siblings)
    return Draft(ranked_tokens[:, 0], probs)


def add_siblings(ranked_tokens: Tensor, probs: Tensor | None, n_siblings: Sequence[int]) -> Draft:
    """Return the tree of a chain and the siblings of its tokens.

    ranked_tokens: [N, 1 + siblings]; the first column is the chain. probs: the distribution from
    which the tokens of each row were drawn without replacement, [N, V]; None: greedy. n_siblings:
    how many siblings of each row are verified.
    """
    device, n = ranked_tokens.device, len(ranked_tokens)
    counts = torch.tensor(n_siblings, device=device)[:, None]
    ranks = torch.arange(1, ranked_tokens.shape[1], device=device)
    rows, columns = (ranks <= counts).nonzero(as_tuple=True)
    siblings = ranked_tokens[rows, 1 + columns]
    if probs is not None:
        # Sampling may have drawn fewer tokens, if fewer have a probability above 0.
        possible = probs[rows].gather(1, siblings[:, None])[:, 0] > 0
        siblings, rows = siblings[possible], rows[possible]
    if not len(rows):
        return Draft(ranked_tokens[:, 0], probs)
    return Draft(
        torch.cat([ranked_tokens[:, 0], siblings]),
        None if probs is None else torch.cat([probs, probs[rows]]),
        parents=(*range(n), *rows.tolist()),
        n_main=n,
    )
