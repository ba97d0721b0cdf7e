"""The three rules: never, below a fixed threshold, and below Draft & Verify's threshold that
follows the acceptance.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.exits.fixed import Fixed

rounds = st.lists(
    st.integers(1, 12).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=60
)


def test_fixed_never_stops_and_asks_for_no_confidence() -> None:
    assert not Fixed.reads_confidence
    assert not any(Fixed().begin().should_stop(c, n) for c in (0.0, 1.0) for n in (1, 50))


def test_confidence_stops_under_its_threshold_and_not_at_it() -> None:
    policy = Confidence(threshold=0.6).begin()
    assert [policy.should_stop(c, 1) for c in (0.5999, 0.6, 0.6001)] == [True, False, False]
    assert not Confidence(threshold=0.0).begin().should_stop(0.0, 1)
    assert Confidence(threshold=1.0).begin().should_stop(0.999, 1)


def test_adaptive_starts_as_draft_and_verify_does() -> None:
    assert Adaptive().model_dump() == {
        "kind": "adaptive",
        "threshold": 0.6,
        "target_acceptance": 0.9,
        "step": 0.01,
        "beta1": 0.5,
        "beta2": 0.9,
    }
    assert [Adaptive().begin().should_stop(c, 1) for c in (0.59, 0.6)] == [True, False]


def test_adaptive_follows_draft_and_verifys_rule_number_by_number() -> None:
    """By hand, with target 0.8: AR = 1/4, then (1/4 + 1)/2 = 0.625, then (0.625 + 1)/2 = 0.8125,
    then 0.90625, then 0.453125.
    """
    policy = Adaptive(threshold=0.6, target_acceptance=0.8, step=0.01, beta1=0.5, beta2=0.9).begin()
    expected = [
        (1, 4, 0.25, 0.601),
        (3, 3, 0.625, 0.602),
        (6, 6, 0.8125, 0.601),
        (2, 2, 0.90625, 0.600),
        (0, 5, 0.453125, 0.601),
    ]
    for accepted, drafted, acceptance, threshold in expected:
        policy.observe(accepted, drafted)
        assert policy.acceptance_rate == pytest.approx(acceptance)
        assert policy.threshold == pytest.approx(threshold)


def test_adaptive_rises_where_the_acceptance_is_exactly_the_target() -> None:
    policy = Adaptive(threshold=0.5, target_acceptance=0.75).begin()
    policy.observe(3, 4)
    assert policy.threshold == pytest.approx(0.501)


def test_the_weights_of_the_past_are_betas() -> None:
    policy = Adaptive(threshold=0.5, target_acceptance=0.5, step=0.2, beta1=0.25, beta2=0.5).begin()
    policy.observe(4, 4)  # AR 1: γ̃ = 0.3, γ = (0.5 + 0.3) / 2
    assert (policy.acceptance_rate, policy.threshold) == (1.0, pytest.approx(0.4))
    policy.observe(0, 4)  # AR 0.25·1 + 0.75·0: γ̃ = 0.6, γ = (0.4 + 0.6) / 2
    assert (policy.acceptance_rate, policy.threshold) == (pytest.approx(0.25), pytest.approx(0.5))


@with_examples(100)
@given(rounds, st.floats(0, 1), st.floats(0, 1))
def test_with_the_papers_constants_the_threshold_moves_by_a_thousandth_a_round(
    told: list[tuple[int, int]], threshold: float, target: float
) -> None:
    policy = Adaptive(threshold=threshold, target_acceptance=target).begin()
    for accepted, drafted in told:
        before = policy.threshold
        policy.observe(accepted, drafted)
        assert abs(policy.threshold - before) <= 0.001 + 1e-12
        assert 0 <= policy.threshold <= 1


def test_the_threshold_falls_while_everything_is_accepted_and_rises_while_nothing_is() -> None:
    policy = Adaptive().begin()
    for _ in range(100):
        policy.observe(5, 5)
    assert policy.threshold == pytest.approx(0.5)
    for _ in range(50):
        policy.observe(0, 5)
    assert policy.threshold == pytest.approx(0.55)


def test_beta_1_of_one_still_lets_the_first_round_count() -> None:
    policy = Adaptive(beta1=1.0).begin()
    policy.observe(1, 2)
    policy.observe(2, 2)
    assert policy.acceptance_rate == 0.5


class Slow:
    """Settings of Draft & Verify that take their time, so that another thread gets its turn within
    every change.
    """

    def __init__(self, settings: Adaptive):
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        sleep(0.001)
        return getattr(self._settings, name)


def test_a_threshold_that_threads_share_loses_no_round() -> None:
    settings = Adaptive(threshold=0.2, step=0.1, beta2=0.5, across_requests=True)
    alone, shared = settings.begin(), settings.begin()
    shared.settings = Slow(settings)  # type: ignore[assignment]
    for _ in range(12):
        alone.observe(0, 4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: shared.observe(0, 4), range(12)))
    assert shared.threshold == pytest.approx(alone.threshold)
    assert shared.threshold > settings.threshold
