"""The field's numbers: closed forms against their definitions, against simulation and against
figures known from the papers.
"""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import product

import numpy as np
import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import (
    EARLY_STOP_WIDENING,
    DecodeStats,
    DrafterStats,
    Estimate,
    Trial,
    estimate_ratio,
    expected_round_tokens,
    expected_speedup,
)

alphas = st.floats(0, 1)


@with_examples(60)
@given(alphas, st.integers(0, 6))
def test_a_rounds_expected_tokens_are_those_of_every_way_it_can_go(
    alpha: float, draft_length: int
) -> None:
    total = 0.0
    for verdicts in product((True, False), repeat=draft_length):
        chance = math.prod(alpha if v else 1 - alpha for v in verdicts)
        total += chance * (1 + (verdicts.index(False) if False in verdicts else draft_length))
    assert expected_round_tokens(alpha, draft_length) == pytest.approx(total)


@with_examples(60)
@given(st.floats(0, 0.999), st.integers(0, 12))
def test_it_is_the_papers_closed_form(alpha: float, draft_length: int) -> None:
    assert expected_round_tokens(alpha, draft_length) == pytest.approx(
        (1 - alpha ** (draft_length + 1)) / (1 - alpha)
    )


def test_at_the_ends_a_round_yields_its_bonus_alone_or_everything() -> None:
    assert expected_round_tokens(0, 5) == 1
    assert expected_round_tokens(1, 5) == 6
    assert expected_round_tokens(0.7, 0) == 1


def test_simulated_rounds_yield_what_the_closed_form_says() -> None:
    accepted = np.random.default_rng(0).random((200_000, 4)) < 0.8
    tokens = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    assert tokens.mean() == pytest.approx(expected_round_tokens(0.8, 4), rel=0.01)


@pytest.mark.parametrize(
    ("alpha", "draft_length", "speedup"), [(0.8, 2, 1.22), (0.9, 3, 1.38), (0.95, 5, 1.51)]
)
def test_half_the_layers_pay_as_the_papers_figures_say(
    alpha: float, draft_length: int, speedup: float
) -> None:
    assert expected_speedup(alpha, draft_length, beta=0.5) == pytest.approx(speedup, abs=0.005)
    assert draft_length == max(range(1, 13), key=lambda n: expected_speedup(alpha, n, 0.5))


@pytest.mark.parametrize(
    ("verify", "speedup"), [(1.0, 1.38), (1.18, 1.29), (1.35, 1.22), (2.3, 0.98)]
)
def test_a_dearer_verify_pass_eats_the_gain(verify: float, speedup: float) -> None:
    best = max(expected_speedup(0.9, n, 0.5, verify) for n in range(1, 13))
    assert best == pytest.approx(speedup, abs=0.005)


@pytest.mark.parametrize(("alpha", "draft_length"), [(-0.1, 2), (1.1, 2), (math.nan, 2), (0.5, -1)])
def test_senseless_arguments_are_refused(alpha: float, draft_length: int) -> None:
    with pytest.raises(ValueError, match=r"alpha is|draft_length is"):
        expected_round_tokens(alpha, draft_length)


# --- counts

counts = st.builds(DecodeStats, *[st.integers(0, 1000)] * 7, *[st.floats(0, 100)] * 4)


def test_three_rounds_counted_by_hand() -> None:
    """Drafts of 4, 4 and 2 tokens of which 4, 1 and 0 stand: 5 + 2 + 1 tokens, behind the prefill's
    own.
    """
    stats = DecodeStats(
        tokens=9,
        rounds=3,
        round_tokens=8,
        drafted=10,
        accepted=5,
        rejecting_rounds=2,
        decode_seconds=4.0,
    )
    assert stats.alpha == 5 / 7
    assert stats.accepted_fraction == 0.5
    assert stats.tau == 8 / 3
    assert stats.seconds_per_token == 0.5


def test_what_was_never_counted_is_none_and_not_a_division_by_zero() -> None:
    stats = DecodeStats()
    assert (stats.alpha, stats.accepted_fraction, stats.tau, stats.seconds_per_token) == (
        None,
        None,
        None,
        None,
    )
    plain = DecodeStats(tokens=5, rounds=4, round_tokens=4)
    assert (plain.alpha, plain.tau) == (None, 1.0)


@with_examples(50)
@given(counts, counts)
def test_stats_add_up_field_by_field_and_leave_their_terms_alone(
    a: DecodeStats, b: DecodeStats
) -> None:
    before = a.as_dict()
    total = a + b
    assert all(
        getattr(total, f.name) == getattr(a, f.name) + getattr(b, f.name)
        for f in fields(DecodeStats)
    )
    assert a.as_dict() == before


def test_a_dictionary_of_stats_holds_every_count_and_what_follows_from_them() -> None:
    stats = DecodeStats(
        tokens=9, rounds=3, round_tokens=8, drafted=10, accepted=5, rejecting_rounds=2
    )
    assert stats.as_dict() == {f.name: getattr(stats, f.name) for f in fields(stats)} | {
        "alpha": 5 / 7,
        "accepted_fraction": 0.5,
        "tau": 8 / 3,
        "seconds_per_token": 0.0,
    }


def test_the_alpha_of_simulated_rounds_estimates_the_probability_they_were_made_with() -> None:
    stands = np.random.default_rng(1).random((40_000, 5)) < 0.7
    accepted = np.cumprod(stands, axis=1).sum(axis=1)
    stats = DecodeStats(
        drafted=stands.size,
        accepted=int(accepted.sum()),
        rejecting_rounds=int((accepted < 5).sum()),
    )
    assert stats.alpha == pytest.approx(0.7, abs=0.005)
    assert stats.accepted_fraction is not None
    assert stats.accepted_fraction < 0.5, "which is another number"


# --- intervals and trials


def test_a_ratio_of_totals_is_not_a_mean_of_ratios() -> None:
    estimate = estimate_ratio([1, 100], [1, 50])
    assert estimate.mean == 101 / 51
    assert estimate.low <= estimate.mean <= estimate.high
    assert estimate.high / estimate.mean == pytest.approx(estimate.mean / estimate.low)


def test_pairs_stay_together_so_that_equal_ratios_leave_no_doubt() -> None:
    estimate = estimate_ratio([2, 20, 200], [1, 10, 100])
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((2, 2, 2))


def test_one_prompt_has_a_ratio_and_no_interval() -> None:
    assert estimate_ratio([3], [2]) == Estimate(1.5, 1.5, 1.5)


def test_prompts_of_equal_length_have_the_interval_of_students_t() -> None:
    """The textbook's interval of a mean of logarithms, which is what small differences amount to:
    2.776 is the quantile of t for 5 prompts.
    """
    logs = np.array([0.01, -0.02, 0.015, 0.0, -0.005])
    estimate = estimate_ratio(np.exp(logs).tolist(), [1.0] * 5)
    reach = 2.776 * logs.std(ddof=1) / 5**0.5
    assert np.log(estimate.high / estimate.mean) == pytest.approx(reach, rel=0.03)


def test_the_interval_of_the_first_prompts_that_seem_enough_is_wider() -> None:
    top, bottom = [2.0, 3.1, 3.9], [1.0, 1.5, 2.0]
    fixed, stopped = (estimate_ratio(top, bottom, early) for early in (False, True))
    assert stopped.mean == fixed.mean
    assert np.log(stopped.high / stopped.mean) == pytest.approx(
        EARLY_STOP_WIDENING * np.log(fixed.high / fixed.mean)
    )


def test_a_prompt_that_outweighs_the_others_widens_the_interval() -> None:
    ratios = np.array([1.0, 1.1, 0.9, 1.05, 0.95, 1.0])
    even, uneven = np.ones(6), np.array([20.0, 1, 1, 1, 1, 1])
    narrow, wide = (estimate_ratio(list(ratios * n), list(n)) for n in (even, uneven))
    assert wide.high / wide.mean > narrow.high / narrow.mean


@pytest.mark.parametrize(
    ("top", "bottom"),
    [([], []), ([1, 2], [1]), ([1], [0]), ([0], [1]), ([1, 1], [1, -1]), ([1], [math.nan])],
)
def test_samples_that_make_no_ratio_are_refused(top: list[float], bottom: list[float]) -> None:
    with pytest.raises(ValueError, match="paired"):
        estimate_ratio(top, bottom)


def test_a_trials_speedup_is_that_over_its_own_baseline_or_unknown() -> None:
    mask = SkipMask(2)
    assert Trial(mask, 0.02, baseline_seconds_per_token=0.03).speedup == pytest.approx(1.5)
    assert Trial(mask, 0.02).speedup is None
    assert Trial(mask, math.inf, baseline_seconds_per_token=0.03).speedup is None


def test_acceptance_is_counted_by_position() -> None:
    first, second = DrafterStats(), DrafterStats()
    first.add_round(3, 1, rejected=True)  # the second token was rejected, the third not judged
    first.add_round(2, 2, rejected=False)
    second.add_round(1, 0, rejected=True)
    assert (first.reached_at, first.accepted_at) == ([2, 2], [2, 1])
    stats = DecodeStats(by_drafter=[first]) + DecodeStats(by_drafter=[first, second])
    assert stats.by_drafter[0].reached_at == [4, 4]
    total = sum(stats.by_drafter, DrafterStats())
    assert total.acceptance_by_position == [4 / 5, 2 / 4]
    assert DrafterStats().acceptance_by_position == []
