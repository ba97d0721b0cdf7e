"""The guard: a drafter that costs more than it gains rests, by counts and not by a clock.

While it rests, decoding is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.drafting import decoder_with
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats, DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.decoding.guard import FIRST_PAUSE, MAX_CREDIT, MAX_PAUSE, Guard
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip

from .checks import MASKS, PROMPTS, assert_partly_accepted

GOOD = DrafterCost(beta=0.25, verify_ratio=1.2, rows_per_round=3.0, net_gain=0.5)


def rests_after(guard: Guard, rounds: list[tuple[int, int]]) -> list[bool]:
    """Return whether drafter 0 rests after each of its rounds (drafted, accepted).

    A round while it rests is a plain one.
    """
    found = []
    for drafted, accepted in rounds:
        if guard.is_paused(0):
            guard.record_round(None)
        else:
            guard.record_round(0, drafted, accepted)
        found.append(guard.is_paused(0))
    return found


def test_a_drafter_rests_once_its_rounds_have_cost_more_than_its_profile_promised() -> None:
    """A round of 3 wrong tokens yields 1 and costs 3 · 0.25 + 1.2.

    It loses 0.95 of the 1.5 that three rounds promise.
    """
    assert rests_after(Guard([GOOD]), [(3, 0)] * 3) == [False, True, True]


def test_a_drafter_that_keeps_its_promise_never_rests() -> None:
    assert not any(rests_after(Guard([GOOD]), [(3, 2), (3, 1), (3, 3), (3, 0)] * 20))


def test_it_is_tried_again_and_each_rest_is_twice_as_long_until_a_try_pays() -> None:
    guard, rests = Guard([GOOD]), []
    for _ in range(6):
        while not guard.is_paused(0):
            guard.record_round(0, 3, 0)
        length = 0
        while guard.is_paused(0):
            guard.record_round(None)
            length += 1
        rests.append(length)
    assert rests == [FIRST_PAUSE * 2**n for n in range(4)] + [MAX_PAUSE] * 2
    guard.record_round(0, 3, 3)  # a try that pays
    while not guard.is_paused(0):
        guard.record_round(0, 3, 0)
    assert (
        sum(not guard.record_round(None) and guard.is_paused(0) for _ in range(99))
        == FIRST_PAUSE - 1
    )


def test_a_long_good_text_is_forgotten_soon_enough() -> None:
    guard = Guard([GOOD])
    rests_after(guard, [(3, 3)] * 1000)
    assert rests_after(guard, [(3, 0)] * 9).index(True) <= MAX_CREDIT / 0.95 + 1


def test_drafters_are_weighed_apart_and_one_without_a_price_is_left_alone() -> None:
    guard = Guard([None, GOOD, GOOD])
    for _ in range(5):
        guard.record_round(0, 3, 0)
        guard.record_round(1, 3, 0)
    assert [guard.is_paused(i) for i in range(3)] == [False, True, False]


class Wrong(DraftSession):
    """A drafter that is never right: it proposes the full model's least likely token."""

    def new_session(self) -> Wrong:
        return self

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        return Draft(torch.full((most,), (int(ctx.pending) + 1) % 64))

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        pass


def test_resting_is_exactly_plain_decoding() -> None:
    model, full = tiny_model_and_reference()
    decoder = decoder_with(model, Wrong(), 3)
    decoder.loop.drafter_costs = [GOOD]
    result = decoder.generate(PROMPTS[0], 60)
    assert result.tokens == full.greedy(PROMPTS[0], 60)
    assert result.stats.by_drafter[0].rounds < 12 < result.stats.rounds, (
        "after two bad rounds it is tried now and then"
    )
    assert result.stats.drafted == 3 * result.stats.by_drafter[0].rounds


def test_each_request_starts_from_the_profile() -> None:
    decoder = decoder_with(tiny_model_and_reference()[0], Wrong(), 3)
    decoder.loop.drafter_costs = [GOOD]
    counted = [decoder.generate(PROMPTS[0], 60).stats.by_drafter for _ in range(2)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_recipe_under_guard_is_lossless_and_repeats_itself(temperature: float) -> None:
    model, full = tiny_model_and_reference()
    recipe = Recipe((Lookup(min_match=1, draft_length=4), Skip.from_mask(MASKS[0], 4, Fixed())))
    strict = [DrafterCost(0.0, 1.3, 3.0, 0.01), DrafterCost(0.7, 1.3, 3.0, 0.01)]
    total = DecodeStats()
    for prompt in PROMPTS:
        first, again = (
            Decoder(model, recipe, drafter_costs=strict).generate(
                prompt, 40, temperature=temperature, seed=3
            )
            for _ in range(2)
        )
        assert (first.tokens, first.stats.by_drafter) == (again.tokens, again.stats.by_drafter)
        if temperature == 0:
            assert first.tokens == full.greedy(prompt, 40)
        total += first.stats
    assert_partly_accepted(total)
    assert all(0 < d.rounds < total.rounds for d in total.by_drafter)
    assert sum(d.rounds for d in total.by_drafter) < total.rounds, (
        "there were rounds in which both rested"
    )


def test_a_bare_mask_or_recipe_has_no_guard() -> None:
    model, _ = tiny_model_and_reference()
    assert not Decoder(model, MASKS[0]).loop.drafter_costs
    assert MASKS[0].n_layers == LAYERS
