"""A sweep over many policies says of each what the simulator says of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.test_simulate import COSTS, MASK, POLICIES, texts
from skipsearch.drafters.exits import EXITS, DraftPolicy, Exit, ExitSession
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.replay.lookup_replay import LookupProposals
from skipsearch.replay.replay import PromptReplay
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.replay.simulate import simulate
from skipsearch.replay.sweep import coarse_policies, fine_policies, sweep, sweep_lookups


def one_by_one(
    replayed: list[PromptReplay],
    policies: list[DraftPolicy],
    before: Sequence[LookupProposals] = (),
) -> np.ndarray:
    rounds = rounds_from_replay(replayed)
    return np.stack([simulate(rounds, MASK, p, COSTS, before).seconds for p in policies])


@given(texts(), st.lists(POLICIES, min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_it_is_the_simulator_for_every_policy_and_prompt(
    replayed: list[PromptReplay], policies: list[DraftPolicy]
) -> None:
    np.testing.assert_allclose(
        sweep(rounds_from_replay(replayed), MASK, policies, COSTS), one_by_one(replayed, policies)
    )


def test_it_is_the_simulator_for_all_the_policies_that_are_tried() -> None:
    random = np.random.default_rng(3)
    replayed = [
        PromptReplay(random.random(n) < 0.8, random.random(n), n + 9) for n in (40, 1, 25, 60)
    ]
    policies = fine_policies(5)
    found = sweep(rounds_from_replay(replayed), MASK, policies, COSTS)
    np.testing.assert_allclose(found, one_by_one(replayed, policies))
    assert len({p.exit.kind for p in policies}) == len(EXITS)
    assert len(np.unique(found.sum(axis=1))) > len(policies) / 4, "they differ"


@pytest.mark.parametrize("max_draft", [1, 2, 12])
def test_no_policy_drafts_more_than_the_table_prices(max_draft: int) -> None:
    for policies in (coarse_policies(max_draft), fine_policies(max_draft)):
        assert {p.draft_length for p in policies} >= {1, max_draft}
        assert max(p.draft_length for p in policies) == max_draft
        assert len(policies) == len(set(policies))


def test_a_kind_that_it_does_not_know_is_left_to_the_simulator() -> None:
    class Third(Exit):
        """Stops every third time that it is asked; it has no vectorised form."""

        kind: Literal["third"] = "third"
        asked: ClassVar[list[int]] = []

        def begin(self) -> ExitSession:
            self.asked.clear()
            return self

        def should_stop(self, confidence: float, n_drafted: int) -> bool:
            self.asked.append(n_drafted)
            return len(self.asked) % 3 == 0

        def observe(self, n_accepted: int, n_drafted: int) -> None:
            pass

    replayed = [PromptReplay(np.arange(20) % 4 > 0, np.ones(20), token_budget=30)]
    policies = [
        DraftPolicy(4, Third()),
        DraftPolicy(4),
        DraftPolicy(6, Adaptive(across_requests=True)),
        DraftPolicy(5, Adaptive()),
    ]
    found = sweep(rounds_from_replay(replayed), MASK, policies, COSTS)
    np.testing.assert_allclose(found, one_by_one(replayed, policies))
    assert found[0] != found[1]


@given(texts(), st.lists(POLICIES, min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_lookups_before_the_skip_drafter_are_walked_as_the_simulator_walks_them(
    replayed: list[PromptReplay], policies: list[DraftPolicy], data: st.DataObject
) -> None:
    n = sum(len(r.acceptance) for r in replayed)
    numbers = st.lists(st.integers(0, 5), min_size=n, max_size=n).map(np.array)
    before = [
        LookupProposals(data.draw(numbers), data.draw(numbers))
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    rounds = rounds_from_replay(replayed)
    np.testing.assert_allclose(
        sweep(rounds, MASK, policies, COSTS, before), one_by_one(replayed, policies, before)
    )
    options = [*([copied] for copied in before), before]  # each alone, and one after the other
    walked = [simulate(rounds, None, None, COSTS, option).seconds for option in options]
    np.testing.assert_allclose(sweep_lookups(rounds, options, COSTS), np.stack(walked))


def test_probabilities_of_acceptance_become_coins_that_every_mask_shares() -> None:
    probabilities = np.full(2000, 0.7)
    first, second = (
        rounds_from_replay([PromptReplay(probabilities, np.ones(2000), token_budget=2001)])
        for _ in range(2)
    )
    np.testing.assert_array_equal(first.accepted_len, second.accepted_len)
    assert (first.accepted_len > 0).mean() == pytest.approx(0.7, abs=0.04)
    sure = rounds_from_replay(
        [
            PromptReplay(np.ones(9), np.ones(9), token_budget=10),
            PromptReplay(np.zeros(4), np.ones(4), token_budget=10),
        ]
    )
    assert sure.accepted_len.tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0]


@given(texts())
@settings(max_examples=50, deadline=None)
def test_a_round_is_real_up_to_and_with_its_first_mismatch_and_drawn_from_the_same_mask_behind_it(
    replayed: list[PromptReplay],
) -> None:
    rounds = rounds_from_replay(replayed)
    pool = np.concatenate([r.confidence for r in replayed])
    assert np.isin(rounds.confidence, pool).all()
    at = 0
    for r in replayed:
        for j in range(len(r.acceptance)):
            run = next((k for k, a in enumerate(r.acceptance[j:]) if not a), len(r.acceptance) - j)
            assert rounds.accepted_len[at] == min(run, rounds.longest_draft)
            known = min(run + 1, len(r.acceptance) - j, rounds.longest_draft)
            np.testing.assert_array_equal(
                rounds.confidence[at, :known], r.confidence[j : j + known]
            )
            assert (rounds.tokens_left[at], rounds.max_draft[at]) == (
                len(r.acceptance) - j,
                r.token_budget - j - 1,
            )
            at += 1
    assert at == len(rounds.accepted_len)
