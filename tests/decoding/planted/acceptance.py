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
from .register import caught_by


def check_sampling_of_likely_tokens() -> None:
    check_sampling(Warp(0.7, top_p=0.8, top_k=3))


@caught_by(check_greedy)
def first_wrong_token_accepted() -> Iterator[None]:
    def accept(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        accepted, _ = acceptance.accept_greedy(drafted, logits)
        accepted = min(accepted + 1, len(drafted))
        return accepted, int(logits[accepted].argmax())

    with patch.object(acceptor, "accept_greedy", accept):
        yield


@caught_by(check_greedy)
def correction_read_from_the_row_behind() -> Iterator[None]:
    def accept(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        accepted, _ = acceptance.accept_greedy(drafted, logits)
        return accepted, int(logits[-1].argmax())

    with patch.object(acceptor, "accept_greedy", accept):
        yield


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


@caught_by(check_acceptance)
def residual_not_renormalised() -> Iterator[None]:
    """Only the check of the rule can see it: draw_tokens accepts such a distribution."""

    def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
        if q is None:
            q = torch.zeros_like(p)
            q[token] = 1
        left = (p - q).clamp(min=0)
        return left if bool(left.sum() > 0) else p

    with patch.object(acceptance, "residual", residual):
        yield


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


@caught_by(check_sampling)
def bonus_token_without_temperature() -> Iterator[None]:
    real = TemperatureSampler.warp_to_probs

    def probs(self: TemperatureSampler, logits: Tensor) -> Tensor:
        warped = real(self, logits)
        if len(logits) > 1:  # a verify pass
            warped[-1] = logits[-1].softmax(dim=-1)
        return warped

    with patch.object(TemperatureSampler, "warp_to_probs", probs):
        yield


@caught_by(check_sampling)
def draft_judged_at_another_temperature() -> Iterator[None]:
    real = TemperatureSampler.draw

    def draw(self: TemperatureSampler, scored: DraftScores) -> tuple[Tensor, Tensor | None]:
        assert scored.probs is not None
        hotter = scored.probs**0.5
        return real(self, scored)[0], hotter / hotter.sum(dim=-1, keepdim=True)

    with patch.object(TemperatureSampler, "draw", draw):
        yield


@caught_by(check_sampling_of_likely_tokens)
def top_p_and_top_k_left_out_of_the_verify_pass() -> Iterator[None]:
    real = TemperatureSampler.warp_to_probs

    def probs(self: TemperatureSampler, logits: Tensor) -> Tensor:
        return (logits / 0.7).softmax(dim=-1) if len(logits) > 1 else real(self, logits)

    with patch.object(TemperatureSampler, "warp_to_probs", probs):
        yield
