"""Bugs of acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import acceptance, acceptor
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.skip.session import SkipSession
from skipsearch.engine import DraftScores, draws
from skipsearch.engine.sampler import TemperatureSampler

from ..acceptance_checks import check_acceptance
from ..checks import check_greedy
from ..sampling_checks import Warp, check_sampling
from .register import caught_by, planted


def check_sampling_of_likely_tokens() -> None:
    check_sampling(Warp(0.7, top_p=0.8, top_k=3))


@planted(check_greedy, acceptor, "accept_greedy")
def first_wrong_token_accepted(real, drafted, logits):
    accepted, _ = acceptance.accept_greedy(drafted, logits)
    accepted = min(accepted + 1, len(drafted))
    return accepted, int(logits[accepted].argmax())


@planted(check_greedy, acceptor, "accept_greedy")
def correction_read_from_the_row_behind(real, drafted, logits):
    accepted, _ = acceptance.accept_greedy(drafted, logits)
    return accepted, int(logits[-1].argmax())


def _swapped(
    drafted: Tensor, q: Tensor | None, p: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    n = len(drafted)
    px = p[:n].gather(1, drafted[:, None])[:, 0]
    qx = torch.ones_like(px) if q is None else q.gather(1, drafted[:, None])[:, 0]
    u = torch.rand(n, generator=generator, dtype=p.dtype)
    accepted = int((u * px < qx).long().cumprod(dim=0).sum())
    weights = (
        p[n]
        if accepted == n
        else acceptance.residual(p[accepted], None if q is None else q[accepted], drafted[accepted])
    )
    return accepted, int(draws.draw_tokens(weights, generator))


@caught_by(check_sampling)
def p_and_q_swapped() -> Iterator[None]:
    with (
        patch.object(acceptor, "accept_sampled", _swapped),
        patch.object(acceptance, "accept_sampled", _swapped),
    ):
        yield


@caught_by(check_acceptance)
def p_and_q_swapped_in_the_rule_alone() -> Iterator[None]:
    with patch.object(acceptance, "accept_sampled", _swapped):
        yield


@planted(check_acceptance, acceptance, "residual")
def residual_not_renormalised(real, p, q, token):
    """Only the check of the rule can see it: draw_tokens accepts such a distribution."""
    if q is None:
        q = torch.zeros_like(p)
        q[token] = 1
    left = (p - q).clamp(min=0)
    return left if bool(left.sum() > 0) else p


@caught_by(check_sampling)
def residual_replaced_by_p() -> Iterator[None]:
    with patch.object(acceptance, "residual", lambda p, q, token: p):
        yield


@caught_by(check_acceptance)
def residual_keeps_the_certain_token() -> Iterator[None]:
    """A one-hot draft is handled as if it had no distribution."""
    real = acceptance.residual
    with patch.object(
        acceptance, "residual", lambda p, q, token: p if q is None else real(p, q, token)
    ):
        yield


@caught_by(check_sampling)
def greedy_draft_entered_as_its_softmax() -> Iterator[None]:
    real = SkipSession.draft

    class Greedy(TemperatureSampler):
        def __init__(self, inner: TemperatureSampler):
            self.key, self.generator, self.warpers = inner.key, inner.generator, inner.warpers

        def draw(self, scored: DraftScores) -> tuple[Tensor, Tensor | None]:
            assert scored.probs is not None
            return scored.probs.argmax(dim=-1, keepdim=True), scored.probs

    def draft(self: SkipSession, ctx: DecodeContext, most: int) -> Draft | None:
        assert isinstance(ctx.sampler, TemperatureSampler)
        return real(self, replace(ctx, sampler=Greedy(ctx.sampler)), most)

    with patch.object(SkipSession, "draft", draft):
        yield


@planted(check_sampling, TemperatureSampler, "warp_to_probs")
def bonus_token_without_temperature(real, self, logits):
    warped = real(self, logits)
    if len(logits) > 1:  # a verify pass
        warped[-1] = logits[-1].softmax(dim=-1)
    return warped


@planted(check_sampling, TemperatureSampler, "draw")
def draft_judged_at_another_temperature(real, self, scored):
    assert scored.probs is not None
    hotter = scored.probs**0.5
    return real(self, scored)[0], hotter / hotter.sum(dim=-1, keepdim=True)


@planted(check_sampling_of_likely_tokens, TemperatureSampler, "warp_to_probs")
def top_p_and_top_k_left_out_of_the_verify_pass(real, self, logits):
    return (logits / 0.7).softmax(dim=-1) if len(logits) > 1 else real(self, logits)
