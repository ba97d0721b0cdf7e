"""A sweep over many policies says of each what the simulator says of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.test_simulate import COSTS, MASK, POLICIES, texts
from skipsearch.evaluation.lookups import Copied
from skipsearch.evaluation.replay import Replayed
from skipsearch.evaluation.rounds import lay_out
from skipsearch.evaluation.simulate import simulate
from skipsearch.evaluation.sweep import every, exploring, sweep, sweep_lookups
from skipsearch.exits import EXITS, DraftPolicy, Exit, ExitSession
from skipsearch.exits.adaptive import Adaptive


def one_by_one(replayed: list[Replayed], policies: list[DraftPolicy], before: Sequence[Copied] = ()) -> np.ndarray:
    rounds = lay_out(replayed)
    return np.stack([simulate(rounds, MASK, p, COSTS, before).seconds for p in policies])


@given(texts(), st.lists(POLICIES, min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_it_is_the_simulator_for_every_policy_and_prompt(replayed: list[Replayed], policies: list[DraftPolicy]) -> None:
    np.testing.assert_allclose(sweep(lay_out(replayed), MASK, policies, COSTS), one_by_one(replayed, policies))


def test_it_is_the_simulator_for_all_the_policies_that_are_tried() -> None:
    random = np.random.default_rng(3)
    replayed = [Replayed(random.random(n) < 0.8, random.random(n), n + 9) for n in (40, 1, 25, 60)]
    policies = every(5)
    found = sweep(lay_out(replayed), MASK, policies, COSTS)
    np.testing.assert_allclose(found, one_by_one(replayed, policies))
    assert len({p.exit.kind for p in policies}) == len(EXITS)
    assert len(np.unique(found.sum(axis=1))) > len(policies) / 4, "they differ"


@pytest.mark.parametrize("max_draft", [1, 2, 12])
def test_no_policy_drafts_more_than_the_table_prices(max_draft: int) -> None:
    for policies in (exploring(max_draft), every(max_draft)):
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

        def stop(self, confidence: float, n_drafted: int) -> bool:
            self.asked.append(n_drafted)
            return len(self.asked) % 3 == 0

        def observe(self, n_accepted: int, n_drafted: int) -> None:
            pass

    replayed = [Replayed(np.arange(20) % 4 > 0, np.ones(20), room=30)]
    policies = [DraftPolicy(4, Third()), DraftPolicy(4), DraftPolicy(6, Adaptive(across_requests=True)), DraftPolicy(5, Adaptive())]
    found = sweep(lay_out(replayed), MASK, policies, COSTS)
    np.testing.assert_allclose(found, one_by_one(replayed, policies))
    assert found[0] != found[1]


@given(texts(), st.lists(POLICIES, min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_lookups_before_the_skip_drafter_are_walked_as_the_simulator_walks_them(replayed: list[Replayed], policies: list[DraftPolicy],
                                                                               data: st.DataObject) -> None:
    n = sum(len(r.agrees) for r in replayed)
    numbers = st.lists(st.integers(0, 5), min_size=n, max_size=n).map(np.array)
    before = [Copied(data.draw(numbers), data.draw(numbers)) for _ in range(data.draw(st.integers(1, 2)))]
    rounds = lay_out(replayed)
    np.testing.assert_allclose(sweep(rounds, MASK, policies, COSTS, before), one_by_one(replayed, policies, before))
    alone = [simulate(rounds, None, None, COSTS, [copied]).seconds for copied in before]
    np.testing.assert_allclose(sweep_lookups(rounds, before, COSTS), np.stack(alone))


def test_probabilities_of_acceptance_become_coins_that_every_mask_shares() -> None:
    probabilities = np.full(2000, 0.7)
    first, second = (lay_out([Replayed(probabilities, np.ones(2000), room=2001)]) for _ in range(2))
    np.testing.assert_array_equal(first.right, second.right)
    assert (first.right > 0).mean() == pytest.approx(0.7, abs=0.04)
    sure = lay_out([Replayed(np.ones(9), np.ones(9), room=10), Replayed(np.zeros(4), np.ones(4), room=10)])
    assert sure.right.tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0]


@given(texts())
@settings(max_examples=50, deadline=None)
def test_a_round_is_real_up_to_and_with_its_first_mismatch_and_drawn_from_the_same_mask_behind_it(replayed: list[Replayed]) -> None:
    rounds = lay_out(replayed)
    pool = np.concatenate([r.confidence for r in replayed])
    assert np.isin(rounds.confidence, pool).all()
    at = 0
    for r in replayed:
        for j in range(len(r.agrees)):
            run = next((k for k, a in enumerate(r.agrees[j:]) if not a), len(r.agrees) - j)
            assert rounds.right[at] == min(run, rounds.longest)
            known = min(run + 1, len(r.agrees) - j, rounds.longest)
            np.testing.assert_array_equal(rounds.confidence[at, :known], r.confidence[j:j + known])
            assert (rounds.left[at], rounds.room[at]) == (len(r.agrees) - j, r.room - j - 1)
            at += 1
    assert at == len(rounds.right)
