"""The `skip` drafter: the model itself without some sub-layers, one token a pass, until its exit
policy says stop.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch.core.mask import SkipMask
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.skip.session import SkipDrafter
from skipsearch.engine import forward

from .test_drafter_contract import context, sampling

MASK = SkipMask(LAYERS, (1, 3), (0, 2))


class Listening:
    """Notes what it is asked and told; stops at its nth token."""

    kind: ClassVar[str] = "listening"
    reads_confidence: ClassVar[bool] = True

    def __init__(self, stop_at: int):
        self.stop_at = stop_at
        self.asked: list[tuple[float, int]] = []
        self.told: list[tuple[int, int]] = []

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        self.asked.append((confidence, n_drafted))
        return n_drafted >= self.stop_at

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        self.told.append((n_accepted, n_drafted))

    shared_across_requests: ClassVar[bool] = False

    def begin(self) -> Listening:
        return self


class Deaf(Listening):
    reads_confidence: ClassVar[bool] = False


def drafted(drafter: SkipDrafter, ctx: DecodeContext, most: int) -> Draft:
    draft = drafter.new_session().draft(ctx, most)
    assert draft is not None
    return draft


@torch.no_grad()
def test_its_first_token_is_what_the_model_says_without_the_skipped_sublayers() -> None:
    ctx, again = context(), context()
    draft = drafted(SkipDrafter(MASK, Fixed()), ctx, 1)
    logits = forward(
        again.model,
        again.pending,
        again.cache,
        again.planner.plan_chain(again.cache.length, 1),
        MASK,
    )
    assert draft.tokens.tolist() == [int(logits[0, -1].argmax())]


@torch.no_grad()
def test_without_a_mask_it_drafts_the_full_models_own_tokens() -> None:
    _, full = tiny_model_and_reference()
    ctx = context()
    tokens = drafted(SkipDrafter(SkipMask(LAYERS), Fixed()), ctx, 9).tokens.tolist()
    assert tokens == full.greedy(ctx.history, 9)


@torch.no_grad()
@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_the_token_at_which_the_policy_stops_is_part_of_the_draft(stop_at: int) -> None:
    policy = Listening(stop_at)
    assert drafted(SkipDrafter(MASK, policy), context(), 8).tokens.shape == (stop_at,)
    assert [n for _, n in policy.asked] == list(range(1, stop_at + 1))
    assert all(0 < confidence < 1 for confidence, _ in policy.asked)


@torch.no_grad()
def test_the_policy_is_not_asked_about_the_last_token_that_fits() -> None:
    policy = Listening(99)
    assert drafted(SkipDrafter(MASK, policy), context(), 4).tokens.shape == (4,)
    assert [n for _, n in policy.asked] == [1, 2, 3]


@torch.no_grad()
def test_a_policy_that_reads_no_confidence_is_never_asked() -> None:
    policy = Deaf(1)
    assert drafted(SkipDrafter(MASK, policy), context(), 4).tokens.shape == (4,)
    assert policy.asked == []


@torch.no_grad()
def test_the_policy_hears_how_many_of_how_many_were_accepted() -> None:
    policy = Listening(3)
    ctx = context()
    session = SkipDrafter(MASK, policy).new_session()
    for accepted in (2, 0, 3):
        session.draft(ctx, 8)
        session.verified(ctx, range(1, 1 + accepted))
    assert policy.told == [(2, 3), (0, 3), (3, 3)]


@torch.no_grad()
def test_confidence_is_the_top_probability_of_what_the_token_was_drawn_from() -> None:
    policy = Listening(99)
    draft = drafted(SkipDrafter(MASK, policy), context(sampling()), 4)
    assert draft.probs is not None
    assert [c for c, _ in policy.asked] == pytest.approx(draft.probs[:3].max(-1).values.tolist())


@torch.no_grad()
def test_a_skipped_attention_writes_nothing_and_the_others_write_theirs() -> None:
    ctx = context()
    length = ctx.cache.length
    drafted(SkipDrafter(MASK, Confidence(threshold=0.0)), ctx, 3)
    written = [bool(k[:, :, length:].any()) for k in ctx.cache.keys if k is not None]
    assert written == [layer not in MASK.attn for layer in range(LAYERS)]


@torch.no_grad()
def test_a_threshold_that_learns_belongs_to_one_request_unless_it_is_shared() -> None:
    for shared in (False, True):
        ctx, drafter = context(), SkipDrafter(MASK, Adaptive(threshold=0.2, across_requests=shared))
        first = drafter.new_session()
        first.draft(ctx, 4)
        first.verified(ctx, ())
        assert (drafter.new_session().exit_session.threshold != 0.2) is shared
