"""What every exit policy promises. A policy is tested here from the moment its line stands in
EXITS.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.drafters.exits import EXITS, DraftPolicy, Exit, ThresholdExitSession, make_exit
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.errors import DecodeError

rounds = st.lists(
    st.integers(1, 12).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=30
)
SETTINGS = [
    (kind, name)
    for kind in EXITS
    for name, field in type(make_exit(kind)).model_fields.items()
    if field.annotation is float
]


@pytest.mark.parametrize("kind", EXITS)
def test_it_is_made_by_the_name_it_carries(kind: str) -> None:
    policy = make_exit(kind)
    assert isinstance(policy, Exit)
    assert policy.kind == kind
    assert isinstance(policy.reads_confidence, bool)
    assert policy.shared_across_requests is False, (
        "unless asked for, what it learns belongs to one request"
    )


@pytest.mark.parametrize("kind", EXITS)
def test_what_is_stored_makes_it_again(kind: str) -> None:
    policy = make_exit(kind)
    assert make_exit(**policy.model_dump(mode="json")) == policy


@pytest.mark.parametrize("kind", EXITS)
@with_examples(40)
@given(told=rounds, confidence=st.floats(0, 1), drafted=st.integers(1, 12))
def test_it_answers_yes_or_no_whatever_it_was_told(
    kind: str, told: list[tuple[int, int]], confidence: float, drafted: int
) -> None:
    policy = make_exit(kind)
    stored, session = policy.model_dump(), policy.begin()
    for accepted, of in told:
        session.observe(accepted, of)
        assert isinstance(session.should_stop(confidence, drafted), bool)
    assert policy.model_dump() == stored, (
        "a profile stores where a policy starts, not where it got to"
    )
    if not policy.reads_confidence:
        assert session.should_stop(0.0, drafted) == session.should_stop(1.0, drafted)


@pytest.mark.parametrize("kind", EXITS)
@with_examples(40)
@given(told=rounds, low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_more_confident_draft_is_never_stopped_where_a_less_confident_one_goes_on(
    kind: str, told: list[tuple[int, int]], low: float, high: float
) -> None:
    session = make_exit(kind).begin()
    for accepted, of in told:
        session.observe(accepted, of)
    assert session.should_stop(min(low, high), 1) >= session.should_stop(max(low, high), 1)


@pytest.mark.parametrize("kind", EXITS)
@with_examples(40)
@given(told=rounds, confidence=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_the_threshold_that_it_names_is_its_whole_rule_until_it_is_told_of_a_round(
    kind: str, told: list[tuple[int, int]], confidence: list[float]
) -> None:
    session = make_exit(kind).begin()
    for accepted, of in [(1, 1), *told]:
        session.observe(accepted, of)
        threshold = (
            session.current_threshold() if isinstance(session, ThresholdExitSession) else None
        )
        if threshold is None:
            return
        for n, top in enumerate([*confidence, threshold], 1):
            assert session.should_stop(top, n) == (top < threshold)
            assert session.current_threshold() == threshold, "asking changes nothing"


@pytest.mark.parametrize("kind", EXITS)
def test_two_requests_share_nothing(kind: str) -> None:
    policy = make_exit(kind)
    taught, beside = policy.begin(), policy.begin()
    for _ in range(500):
        taught.observe(0, 4)
    for session in (beside, policy.begin()):
        assert [session.should_stop(c / 100, 1) for c in range(101)] == [
            make_exit(kind).begin().should_stop(c / 100, 1) for c in range(101)
        ]


@pytest.mark.parametrize("kind", EXITS)
@with_examples(40)
@given(
    told=st.lists(rounds, min_size=1, max_size=4),
    confidence=st.lists(st.floats(0, 1), min_size=5, max_size=5),
)
def test_its_vectorised_form_is_the_rule_itself(
    kind: str, told: list[list[tuple[int, int]]], confidence: list[float]
) -> None:
    policy, row = make_exit(kind), np.array([confidence])

    def one_by_one(session) -> int:
        return next(
            (n + 1 for n, top in enumerate(confidence) if session.should_stop(top, n + 1)),
            len(confidence),
        )

    if (stops := policy.stop_lengths(row)) is not None:
        assert stops.tolist() == [one_by_one(policy.begin())]
    elif (walkers := policy.make_batched([policy] * len(told))) is not None:
        for walker, rounds_of in enumerate(told):
            session = policy.begin()
            for accepted, drafted in rounds_of:
                session.observe(accepted, drafted)
                walkers.observe(np.array([walker]), np.array([accepted]), np.array([drafted]))
            assert walkers.stop_lengths(np.array([walker]), row).tolist() == [one_by_one(session)]


@pytest.mark.parametrize("kind", EXITS)
def test_a_search_tries_it_with_settings_of_its_own(kind: str) -> None:
    coarse, fine = (
        list(type(make_exit(kind)).search_grid(False)),
        list(type(make_exit(kind)).search_grid(True)),
    )
    assert fine
    assert {policy.kind for policy in [*coarse, *fine]} == {kind}
    assert len(set(fine)) == len(fine) >= len(coarse)


def test_an_unknown_kind_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(DecodeError, match="no exit policy called 'adaptiv'; did you mean adaptive"):
        make_exit("adaptiv")


@pytest.mark.parametrize(("kind", "name"), SETTINGS)
@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan"), float("inf"), "0.5"])
def test_a_setting_outside_0_to_1_is_refused_by_name(
    kind: str, name: str, value: float | str
) -> None:
    with pytest.raises(DecodeError, match=f"{name} is {value!r}"):
        make_exit(kind, **{name: value})


def test_a_setting_that_it_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(DecodeError, match="treshold"):
        make_exit("confidence", treshold=0.5)


def test_a_draft_policy_says_what_it_is() -> None:
    assert (
        str(DraftPolicy(8, Adaptive(threshold=0.5, target_acceptance=0.8)))
        == "adaptive 0.5 for 0.8, up to 8"
    )
    assert str(DraftPolicy(3)) == "fixed, up to 3"
