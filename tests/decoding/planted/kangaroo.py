"""Bugs of kangaroo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import loop
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.kangaroo.session import KangarooSession, ResumingSession
from skipsearch.drafters.kangaroo.weights import EarlyExitDraft
from skipsearch.models import ModelAdapter, weight_overlay
from skipsearch.models.kv_cache import KVCache, PassPlan

from ..kangaroo_checks import (
    check_kangaroo_drafts,
    check_kangaroo_passes,
    check_kangaroo_restricted,
    check_kangaroo_siblings,
)
from ..trained_checks import check_kangaroo_committed
from .register import caught_by


@caught_by(check_kangaroo_drafts)
def adapter_does_not_catch_up() -> Iterator[None]:
    """Some tokens never reach the adapter's cache.

    These are the last token of a wholly accepted round, and the tokens of other drafters.
    """
    real = ResumingSession._pending_features

    def behind(self: ResumingSession, ctx: DecodeContext) -> Tensor:
        return real(self, ctx)[:, -1:]

    with patch.object(ResumingSession, "_pending_features", behind):
        yield


@caught_by(check_kangaroo_drafts)
def adapter_is_not_rolled_back() -> Iterator[None]:
    """The adapter's K/V of rejected tokens are taken for those of the tokens in their places."""
    yield from _not_rolled_back()


def _not_rolled_back() -> Iterator[None]:
    real = ResumingSession.verified

    def verified(self: ResumingSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        real(self, ctx, path)
        self.n_in_cache = self._round_start + self._n_drafted

    with patch.object(ResumingSession, "verified", verified):
        yield


@caught_by(check_kangaroo_drafts)
def rows_of_rejected_tokens_are_kept() -> Iterator[None]:
    """The adapter reads the states of all rows of a verify pass, rejected tokens included."""

    def committed(self: ResumingSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        states = torch.cat(self._tapped, dim=1)
        start = ctx.cache.length - 1 - len(path)
        self._unread_features.append(states[:, max(0, self.n_in_cache - start) :])
        self._tapped = []

    with patch.object(ResumingSession, "committed", committed):
        yield


@caught_by(check_kangaroo_drafts)
def verification_resumes_from_stale_rows() -> Iterator[None]:
    """A draft passes on the rows of the round before."""
    real, kept = ResumingSession._attach_partial_pass, dict[tuple[int, ...], Tensor]()

    def resuming(self: ResumingSession, draft: Draft, reached: Tensor) -> Draft:
        stale = kept.get(reached.shape, reached)
        kept[reached.shape] = reached
        return real(self, draft, stale)

    with patch.object(ResumingSession, "_attach_partial_pass", resuming):
        yield


@caught_by(check_kangaroo_drafts)
def verification_resumes_a_layer_too_late() -> Iterator[None]:
    real = loop.resume_pass

    def resumed(
        model: Any,
        hidden: Tensor,
        first: int,
        rest: Tensor,
        cache: KVCache,
        plan: PassPlan,
        tap: Any,
    ) -> Tensor:
        return real(model, hidden, first + 1, rest, cache, plan, lambda i, h: tap(i - 1, h))

    with patch.object(loop, "resume_pass", resumed):
        yield


@caught_by(check_kangaroo_siblings)
def siblings_skip_the_layers_below_the_exit() -> Iterator[None]:
    """A row without a draft pass gets the row of another token that had one."""
    real = loop.resume_pass

    def resumed(model: Any, hidden: Tensor, first: int, rest: Tensor, *arguments: Any) -> Tensor:
        return real(model, hidden, first, rest[:, :1].expand_as(rest), *arguments)

    with patch.object(loop, "resume_pass", resumed):
        yield


@caught_by(check_kangaroo_passes)
def verification_begins_at_layer_0() -> Iterator[None]:
    """Tokens are right, but the layers below the exit run twice."""
    with patch.object(ResumingSession, "_attach_partial_pass", lambda self, draft, reached: draft):
        yield


@caught_by(check_kangaroo_drafts)
def unsure_token_is_dropped() -> Iterator[None]:
    """The token at which a round stops is not verified, although its feature is computed."""
    real = KangarooSession.draft

    def draft(self: KangarooSession, ctx: DecodeContext, most: int) -> Draft | None:
        found = real(self, ctx, most)
        if found is None or len(found.tokens) in (1, most):
            return found
        self._n_drafted -= 1
        return Draft(found.tokens[:-1], None if found.probs is None else found.probs[:-1])

    with patch.object(KangarooSession, "draft", draft):
        yield


@caught_by(check_kangaroo_drafts)
def final_norm_in_the_place_of_the_adapters() -> Iterator[None]:
    def logits(self: EarlyExitDraft, adapter: ModelAdapter, *arguments: Any) -> Tensor:
        return self.model.head(self.run_adapter(*arguments)[:, -1:])[:, -1]

    with patch.object(EarlyExitDraft, "compute_last_logits", logits):
        yield


@caught_by(check_kangaroo_drafts)
def both_norms_before_the_head() -> Iterator[None]:
    """The adapter's norm is followed by the model's final norm."""

    def logits(self: EarlyExitDraft, adapter: ModelAdapter, *arguments: Any) -> Tensor:
        [own] = weight_overlay.get_final_norm(self.adapter).values()
        h = self.run_adapter(*arguments)[:, -1:]
        h = own * h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return self.model.head(h)[:, -1]

    with patch.object(EarlyExitDraft, "compute_last_logits", logits):
        yield


@caught_by(check_kangaroo_restricted)
def draft_computes_the_whole_head() -> Iterator[None]:
    """The draft proposes tokens that its vocabulary does not have."""
    real = KangarooSession.draft

    def draft(self: KangarooSession, ctx: DecodeContext, most: int) -> Draft | None:
        sampler = getattr(ctx.sampler, "sampler", ctx.sampler)
        return real(self, replace(ctx, model=self.early_exit_draft.adapter, sampler=sampler), most)

    with patch.object(KangarooSession, "draft", draft):
        yield


@caught_by(check_kangaroo_committed)
def adapter_keeps_what_it_wrote_of_rejected_tokens() -> Iterator[None]:
    yield from _not_rolled_back()


@caught_by(check_kangaroo_committed)
def draft_writes_a_slot_too_early() -> Iterator[None]:
    """The layers below the exit overwrite the last committed token."""
    real = ResumingSession._compute_features

    def features(self: ResumingSession, token: Tensor, ctx: DecodeContext, slot: int) -> Tensor:
        real(self, token, ctx, slot - 1)
        return real(self, token, ctx, slot)

    with patch.object(ResumingSession, "_compute_features", features):
        yield
