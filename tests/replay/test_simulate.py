"""The simulator walks replayed positions as real decoding walks the text: the same rounds, counts
and policy, with table costs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
from helpers.marks import thorough
from helpers.tiny import LAYERS, tiny_model_and_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Siblings
from skipsearch.core.stats import DecodeStats, DrafterStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.models import ModelAdapter, load_adapter
from skipsearch.replay.lookup_replay import LookupProposals
from skipsearch.replay.replay import PromptReplay, Replay
from skipsearch.replay.rounds import rounds_from_replay, rounds_without_model
from skipsearch.replay.simulate import Prediction, SimulatedRound, simulate, simulate_rounds

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))
MASK = SkipMask(LAYERS, (1, 3), (2,))
TOKENS = 40
COSTS = Costs(tuple(range(1, 2 * LAYERS + 1)), 0.5, tuple(100.0 + rows for rows in range(6)))

CODE = (
    "import os\n\n\ndef walk(folder, suffix='.py'):\n    for name in",
    "    def test_empty(self):\n        self.assertEqual(",
    "# Parse the command line and print what was found.\ndef main(arguments=None):\n    parser =",
    "    def add(self, key, value):\n        if key in self._items:\n            raise",
    "def mean(values):\n    total = 0\n    for value in",
)

SIBLINGS = st.none() | st.builds(Siblings, below=st.floats(0, 1), most=st.integers(1, 4))
POLICIES = st.one_of(
    st.builds(DraftPolicy, st.integers(1, 8), siblings=SIBLINGS),
    st.builds(
        lambda n, t, beside: DraftPolicy(n, Confidence(threshold=t), beside),
        st.integers(1, 8),
        st.floats(0, 1),
        SIBLINGS,
    ),
    st.builds(
        lambda n, t: DraftPolicy(n, Adaptive(threshold=t)), st.integers(1, 8), st.floats(0, 1)
    ),
)


@st.composite
def texts(draw: st.DrawFn) -> list[PromptReplay]:
    prompts = []
    for _ in range(draw(st.integers(1, 4))):
        agrees = draw(st.lists(st.booleans(), min_size=1, max_size=30))
        confidence = draw(st.lists(st.floats(0, 1), min_size=len(agrees), max_size=len(agrees)))
        ranks = draw(st.lists(st.integers(1, 5), min_size=len(agrees), max_size=len(agrees)))
        prompts.append(
            PromptReplay(
                np.array(agrees),
                np.array(confidence),
                len(agrees) + draw(st.integers(0, 10)),
                ranks=np.where(agrees, 0, ranks),
            )
        )
    return prompts


@cache
def world() -> tuple[ModelAdapter, Replay]:
    model, _ = tiny_model_and_reference()
    return model, Replay(model, PROMPTS, TOKENS, end_on_repeat=6)


def predicted(
    replayed: list[PromptReplay], policy: DraftPolicy, mask: SkipMask = MASK
) -> Prediction:
    return simulate(rounds_from_replay(replayed, longest_draft=50), mask, policy, COSTS)


def decoded(policy: DraftPolicy, mask: SkipMask, end_on_repeat: int | None = 6) -> DecodeStats:
    decoder = Decoder(world()[0], mask, draft_length=policy.draft_length, exit_policy=policy.exit)
    return sum(
        (decoder.generate(p, TOKENS, end_on_repeat=end_on_repeat).stats for p in PROMPTS),
        DecodeStats(),
    )


def counts(stats: DecodeStats) -> dict[str, int]:
    return {
        name: getattr(stats, name)
        for name in ("tokens", "round_tokens", "rounds", "drafted", "accepted", "rejecting_rounds")
    }


# --- against real decoding


@pytest.mark.parametrize(
    "mask",
    [MASK, SkipMask(LAYERS, (0,), (0, 4)), SkipMask(LAYERS, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4))],
)
def test_with_one_drafted_token_a_round_it_counts_exactly_what_real_decoding_counts(
    mask: SkipMask,
) -> None:
    prediction = predicted(world()[1](mask), DraftPolicy(1), mask)
    assert counts(prediction.stats) == counts(decoded(DraftPolicy(1), mask))
    assert prediction.stats.rejecting_rounds > 0
    if mask == MASK:
        assert prediction.stats.accepted > 0


@pytest.mark.parametrize("draft_length", [1, 3, 50])
def test_with_a_draft_that_skips_nothing_it_counts_exactly_what_real_decoding_counts(
    draft_length: int,
) -> None:
    model, _ = world()
    nothing, policy = SkipMask(LAYERS), DraftPolicy(draft_length)
    replay = Replay(
        model, PROMPTS, TOKENS, end_on_repeat=None
    )  # all texts end by their length: see the next test
    prediction = predicted(replay(nothing), policy, nothing)
    assert counts(prediction.stats) == counts(decoded(policy, nothing, end_on_repeat=None))
    assert prediction.stats.accepted == prediction.stats.drafted


def test_correct_draft_tokens_after_the_end_of_the_text_are_not_counted_as_accepted() -> None:
    text = PromptReplay(np.array([True, True, False]), np.ones(3), token_budget=20)
    stats = predicted([text], DraftPolicy(8)).stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.rejecting_rounds) == (1, 8, 2, 1)
    ended = PromptReplay(np.array([True, True, True]), np.ones(3), token_budget=20)
    stats = predicted([ended], DraftPolicy(8)).stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.rejecting_rounds) == (1, 8, 3, 0), (
        "the text ended, nobody was rejected"
    )


@pytest.mark.parametrize(
    "policy", [DraftPolicy(8, Confidence(threshold=0.5)), *thorough(DraftPolicy(4))], ids=str
)
def test_on_a_trained_model_its_acceptance_and_tokens_a_round_are_near_those_of_real_decoding(
    policy: DraftPolicy,
) -> None:
    model, replay, prompts, mask = trained()
    real = Decoder(model, mask, draft_length=policy.draft_length, exit_policy=policy.exit)
    measured = sum((real.generate(p, 40, end_on_repeat=6).stats for p in prompts), DecodeStats())
    stats = predicted_on_demo(replay, mask, policy).stats
    assert stats.alpha == pytest.approx(measured.alpha, abs=0.04)
    assert stats.tau == pytest.approx(measured.tau, rel=0.1)
    assert 0.3 < (measured.alpha or 0) < 0.98


@cache
def trained() -> tuple[ModelAdapter, Replay, list[tuple[int, ...]], SkipMask]:
    model = load_adapter("demo", device="cpu", dtype="float32")
    prompts = [tuple(model.tokenizer(text)["input_ids"]) for text in CODE]
    mask = SkipMask(model.spec.n_layers, attn=(5, 9, 13, 15), mlp=(7, 11, 12, 15))
    return model, Replay(model, prompts, 40, end_on_repeat=6), prompts, mask


def predicted_on_demo(replay: Replay, mask: SkipMask, policy: DraftPolicy) -> Prediction:
    n = mask.n_layers
    return simulate(
        rounds_from_replay(replay(mask)), mask, policy, Costs((1.0,) * 2 * n, 1.0, (2.0 * n,) * 13)
    )


# --- whatever the text and the policy


@given(texts(), POLICIES)
@settings(max_examples=150, deadline=None)
def test_counts_add_up(replayed: list[PromptReplay], policy: DraftPolicy) -> None:
    prediction = predicted(replayed, policy)
    stats = prediction.stats
    assert stats.round_tokens == sum(len(r.acceptance) for r in replayed) == prediction.tokens.sum()
    assert stats.tokens == stats.round_tokens + len(replayed)
    ran_over = stats.accepted + stats.rounds - stats.round_tokens
    assert 0 <= ran_over <= len(replayed), (
        "a round yields what was accepted and one more, but for the last one of a text"
    )
    assert 0 <= stats.accepted <= stats.drafted <= policy.draft_length * stats.rounds
    assert stats.accepted <= sum(int(r.acceptance.sum()) for r in replayed) + (
        stats.rounds if policy.siblings else 0
    )
    assert stats.rejecting_rounds <= stats.rounds
    assert stats.decode_seconds == pytest.approx(prediction.seconds.sum())
    assert prediction.seconds_per_token == pytest.approx(stats.decode_seconds / stats.round_tokens)
    assert prediction.stderr >= 0


@given(texts(), POLICIES)
@settings(max_examples=100, deadline=None)
def test_time_is_that_of_all_draft_passes_and_of_verify_passes_by_their_rows(
    replayed: list[PromptReplay], policy: DraftPolicy
) -> None:
    rows_free = Costs(COSTS.sublayers, COSTS.overhead, (100.0,) * 6)
    stats = simulate(rounds_from_replay(replayed), MASK, policy, rows_free).stats
    assert stats.decode_seconds == pytest.approx(
        stats.drafted * rows_free.draft_step_seconds(MASK) + stats.rounds * 100
    )
    by_row = Costs((0.0,) * 2 * LAYERS, 0.0, tuple(100.0 + rows for rows in range(9)))
    stats = simulate(rounds_from_replay(replayed), MASK, policy, by_row).stats
    proposed = stats.drafted + stats.by_drafter[0].siblings
    assert stats.decode_seconds == pytest.approx(stats.rounds * 100 + proposed), (
        "row n costs 100 + n"
    )


@given(texts(), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_a_threshold_of_zero_never_stops_and_is_a_fixed_length(
    replayed: list[PromptReplay], length: int
) -> None:
    never = predicted(replayed, DraftPolicy(length, Confidence(threshold=0.0)))
    assert counts(never.stats) == counts(predicted(replayed, DraftPolicy(length)).stats)


@given(texts(), POLICIES)
@settings(max_examples=50, deadline=None)
def test_no_round_drafts_more_than_may_still_be_emitted(
    replayed: list[PromptReplay], policy: DraftPolicy
) -> None:
    tight = [PromptReplay(r.acceptance, r.confidence, len(r.acceptance)) for r in replayed]
    stats = predicted(tight, policy).stats
    assert stats.accepted + stats.rounds == stats.round_tokens, (
        "no round runs over the end of a text that fills its room"
    )


def test_the_last_token_of_a_full_room_is_not_drafted() -> None:
    stats = predicted(
        [PromptReplay(np.array([True]), np.ones(1), token_budget=1)], DraftPolicy(4)
    ).stats
    assert (stats.rounds, stats.drafted, stats.rejecting_rounds) == (1, 0, 0)


def test_a_low_confidence_ends_the_draft_behind_the_token_it_belongs_to() -> None:
    text = PromptReplay(
        np.array([True, True, True, True]), np.array([0.9, 0.2, 0.9, 0.9]), token_budget=5
    )
    stats = predicted([text], DraftPolicy(3, Confidence(threshold=0.5))).stats
    assert (stats.rounds, stats.drafted, stats.accepted) == (2, 2 + 1, 3), (
        "two drafted and one more emitted, then one that fits"
    )


def test_the_threshold_of_an_adaptive_policy_starts_anew_at_each_prompt_unless_it_is_shared() -> (
    None
):
    text = PromptReplay(np.array([True, False] * 10), np.full(20, 0.6005), token_budget=30)
    for shared in (False, True):
        both = predicted(
            [text, text],
            DraftPolicy(4, Adaptive(threshold=0.6, target_acceptance=0.9, across_requests=shared)),
        )
        assert bool(both.seconds[0] != both.seconds[1]) is shared


class Spy:
    """An exit policy that never stops and notes what it hears."""

    reads_confidence: ClassVar[bool] = True
    shared_across_requests: ClassVar[bool] = False

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def begin(self) -> Spy:
        return self

    def should_stop(self, confidence: float, n_drafted: int) -> bool:
        return False

    def observe(self, n_accepted: int, n_drafted: int) -> None:
        self.heard.append((n_accepted, n_drafted))


def test_a_policy_hears_of_every_round_that_drafted_and_of_no_other() -> None:
    text, spy = (
        PromptReplay(np.array([True, False, True, True, True, True]), np.ones(6), token_budget=6),
        Spy(),
    )
    simulate_rounds(rounds_from_replay([text]), DraftPolicy(3, spy))  # type: ignore[arg-type]
    assert spy.heard == [(1, 3), (3, 3)]
    spy.heard.clear()
    simulate_rounds(
        rounds_from_replay([PromptReplay(np.array([True]), np.ones(1), token_budget=1)]),
        DraftPolicy(3, spy),
    )  # type: ignore[arg-type]
    assert spy.heard == []


def test_the_first_drafter_that_proposes_something_drafts_the_round() -> None:
    """Six anchors; the first lookup speaks at anchors 0 and 4, the second at 0 and 2; the mask is
    right everywhere.
    """
    spy, text = Spy(), PromptReplay(np.ones(6, dtype=bool), np.ones(6), token_budget=6)
    first = LookupProposals(np.array([2, 0, 0, 0, 3, 0]), np.array([1, 0, 0, 0, 2, 0]))
    second = LookupProposals(np.array([9, 0, 2, 0, 0, 0]), np.array([9, 0, 0, 0, 0, 0]))
    stats, drafts = simulate_rounds(
        rounds_from_replay([text]), DraftPolicy(1, spy), [first, second]
    )  # type: ignore[arg-type]
    assert drafts == [
        [
            SimulatedRound(0, 2, position=0),
            SimulatedRound(1, 2, position=2),
            SimulatedRound(2, 1, position=3),
            SimulatedRound(2, 0, position=5),
        ]
    ], "position 5 has no room"
    assert stats.by_drafter == [
        DrafterStats(1, 2, 1, 1),
        DrafterStats(1, 2, 0, 1),
        DrafterStats(1, 1, 1, 0),
    ]
    assert spy.heard == [(1, 1)], "an exit policy hears of its own drafter's rounds alone"


def test_rounds_are_priced_by_who_drafted_them() -> None:
    costs = Costs((1.0,) * 2 * LAYERS, 2.0, (10.0, 11.0, 12.0))
    text = PromptReplay(np.ones(4, dtype=bool), np.ones(4), token_budget=5)
    copied = LookupProposals(np.array([1, 0, 0, 0]), np.array([1, 0, 0, 0]))
    mask = SkipMask(LAYERS, tuple(range(LAYERS)))
    found = simulate(rounds_from_replay([text]), mask, DraftPolicy(1), costs, [copied])
    assert found.seconds.tolist() == [11.0 + (costs.draft_step_seconds(mask) + 11.0)], (
        "a looked-up token costs its row of the verify pass alone"
    )
    plain = simulate(rounds_without_model([[1, 2, 3, 4, 5]], [5]), None, None, costs)
    assert plain.seconds.tolist() == [40.0]


def test_the_standard_error_is_over_prompts() -> None:
    good, bad = (
        PromptReplay(np.full(10, right), np.ones(10), token_budget=10) for right in (True, False)
    )
    assert predicted([good], DraftPolicy(2)).stderr == 0
    assert predicted([good, good], DraftPolicy(2)).stderr == pytest.approx(0)
    few, many = predicted([good, bad], DraftPolicy(2)), predicted([good, bad] * 8, DraftPolicy(2))
    assert few.stderr > many.stderr > 0


def test_a_sibling_that_the_full_model_prefers_saves_its_token_and_costs_a_row() -> None:
    text = PromptReplay(
        np.array([True, False, True, False, True, True, True]),
        np.array([0.9, 0.4, 0.9, 0.3, 0.9, 0.9, 0.9]),
        token_budget=20,
        ranks=np.array([0, 1, 0, 3, 0, 0, 0]),
    )
    alone, one, three = (
        predicted([text], DraftPolicy(2, siblings=beside))
        for beside in (None, Siblings(below=0.5, most=1), Siblings(below=0.5, most=3))
    )
    found = [
        (p.stats.rounds, p.stats.accepted, p.stats.by_drafter[0].siblings)
        for p in (alone, one, three)
    ]
    assert found == [(3, 4, 0), (3, 4, 2), (3, 5, 6)], (
        "from 0, 2, 4; from 0, 3, 4, the second sibling of 3 untried; from 0, 3, 5"
    )
    for p, rows in ((one, 3), (three, 5)):
        two_rounds_with_siblings = 2 * (COSTS.verify_seconds(rows) - COSTS.verify_seconds(2))
        assert p.seconds.sum() == pytest.approx(
            3 * COSTS.round_seconds(MASK, 2)[2] + two_rounds_with_siblings
        )


def test_a_verify_pass_longer_than_any_measured_costs_more_by_its_rows() -> None:
    text = PromptReplay(np.ones(9, dtype=bool), np.ones(9), token_budget=20)
    costs = Costs((0.0,) * 2 * LAYERS, 0.0, (1.0, 2.0, 3.0))
    assert (
        simulate(rounds_from_replay([text]), MASK, DraftPolicy(8), costs).stats.decode_seconds
        == 9.0
    )
    assert COSTS.verify_seconds(4) == COSTS.verify[4]
    assert COSTS.verify_seconds(9) == pytest.approx(
        COSTS.verify[5] + 4 * (COSTS.verify[5] - COSTS.verify[1]) / 4
    )
    assert replace(COSTS, verify=(3.0, 3.5)).verify_seconds(6) == 3.5
