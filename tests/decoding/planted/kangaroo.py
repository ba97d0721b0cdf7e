"""Bugs of kangaroo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import loop
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.kangaroo.session import KangarooSession, ResumingSession
from skipsearch.drafters.kangaroo.weights import EarlyExitDraft
from skipsearch.models import weight_overlay

from ..kangaroo_checks import (
    check_kangaroo_drafts,
    check_kangaroo_passes,
    check_kangaroo_restricted,
    check_kangaroo_siblings,
)
from ..trained_checks import check_kangaroo_committed
from .register import caught_by, planted


@planted(check_kangaroo_drafts, ResumingSession, "_pending_features")
def adapter_does_not_catch_up(real, self, ctx):
    """Some tokens never reach the adapter's cache.

    These are the last token of a wholly accepted round, and the tokens of other drafters.
    """
    return real(self, ctx)[:, -1:]


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


@planted(check_kangaroo_drafts, ResumingSession, "committed")
def rows_of_rejected_tokens_are_kept(real, self, ctx, path):
    """The adapter reads the states of all rows of a verify pass, rejected tokens included."""
    states = torch.cat(self._tapped, dim=1)
    start = ctx.cache.length - 1 - len(path)
    self._unread_features.append(states[:, max(0, self.n_in_cache - start) :])
    self._tapped = []


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


@planted(check_kangaroo_drafts, loop, "resume_pass")
def verification_resumes_a_layer_too_late(real, model, hidden, first, rest, cache, plan, tap):
    return real(model, hidden, first + 1, rest, cache, plan, lambda i, h: tap(i - 1, h))


@planted(check_kangaroo_siblings, loop, "resume_pass")
def siblings_skip_the_layers_below_the_exit(real, model, hidden, first, rest, *arguments):
    """A row without a draft pass gets the row of another token that had one."""
    return real(model, hidden, first, rest[:, :1].expand_as(rest), *arguments)


@caught_by(check_kangaroo_passes)
def verification_begins_at_layer_0() -> Iterator[None]:
    """Tokens are right, but the layers below the exit run twice."""
    with patch.object(ResumingSession, "_attach_partial_pass", lambda self, draft, reached: draft):
        yield


@planted(check_kangaroo_drafts, KangarooSession, "draft")
def unsure_token_is_dropped(real, self, ctx, most):
    """The token at which a round stops is not verified, although its feature is computed."""
    found = real(self, ctx, most)
    if found is None or len(found.tokens) in (1, most):
        return found
    self._n_drafted -= 1
    return Draft(found.tokens[:-1], None if found.probs is None else found.probs[:-1])


@planted(check_kangaroo_drafts, EarlyExitDraft, "compute_last_logits")
def final_norm_in_the_place_of_the_adapters(real, self, adapter, *arguments):
    return self.model.head(self.run_adapter(*arguments)[:, -1:])[:, -1]


@planted(check_kangaroo_drafts, EarlyExitDraft, "compute_last_logits")
def both_norms_before_the_head(real, self, adapter, *arguments):
    """The adapter's norm is followed by the model's final norm."""
    [own] = weight_overlay.get_final_norm(self.adapter).values()
    h = self.run_adapter(*arguments)[:, -1:]
    h = own * h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return self.model.head(h)[:, -1]


@planted(check_kangaroo_restricted, KangarooSession, "draft")
def draft_computes_the_whole_head(real, self, ctx, most):
    """The draft proposes tokens that its vocabulary does not have."""
    sampler = getattr(ctx.sampler, "sampler", ctx.sampler)
    return real(self, replace(ctx, model=self.early_exit_draft.adapter, sampler=sampler), most)


@caught_by(check_kangaroo_committed)
def adapter_keeps_what_it_wrote_of_rejected_tokens() -> Iterator[None]:
    yield from _not_rolled_back()


@planted(check_kangaroo_committed, ResumingSession, "_compute_features")
def draft_writes_a_slot_too_early(real, self, token, ctx, slot):
    """The layers below the exit overwrite the last committed token."""
    real(self, token, ctx, slot - 1)
    return real(self, token, ctx, slot)
