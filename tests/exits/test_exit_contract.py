"""What every exit policy promises. A policy is tested here from the moment its line stands in EXITS."""

from __future__ import annotations

from typing import get_args

import pytest
from helpers.properties import examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.errors import DecodeError
from skipsearch.exits import EXITS, DraftPolicy, make_exit
from skipsearch.exits.adaptive import Adaptive
from skipsearch.profile import schema

rounds = st.lists(st.integers(1, 12).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=30)


@pytest.mark.parametrize("kind", EXITS)
def test_it_is_made_by_the_name_it_carries(kind: str) -> None:
    policy = make_exit(kind)
    assert policy.kind == kind
    assert isinstance(policy.reads_confidence, bool)


@pytest.mark.parametrize("kind", EXITS)
def test_its_parameters_are_what_a_profile_stores_and_make_it_again(kind: str) -> None:
    policy = make_exit(kind)
    union, _ = get_args(schema.Exit)
    [part] = [part for part in get_args(union) if part.model_fields["kind"].default == kind]
    assert set(policy.parameters()) == set(part.model_fields) - {"kind"}
    assert part(**policy.parameters()).model_dump() == {"kind": kind} | policy.parameters()
    assert make_exit(kind, **policy.parameters()).parameters() == policy.parameters()


@pytest.mark.parametrize("kind", EXITS)
@examples(40)
@given(told=rounds, confidence=st.floats(0, 1), drafted=st.integers(1, 12))
def test_it_answers_yes_or_no_whatever_it_was_told_and_stays_storable(kind: str, told: list[tuple[int, int]], confidence: float,
                                                                      drafted: int) -> None:
    policy = make_exit(kind)
    stored = policy.parameters()
    for accepted, of in told:
        policy.observe(accepted, of)
        assert isinstance(policy.stop(confidence, drafted), bool)
    assert policy.parameters() == stored, "a profile stores where a policy starts, not where it got to"
    if not policy.reads_confidence:
        assert policy.stop(0.0, drafted) == policy.stop(1.0, drafted)


@pytest.mark.parametrize("kind", EXITS)
@examples(40)
@given(told=rounds, low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_more_confident_draft_is_never_stopped_where_a_less_confident_one_goes_on(kind: str, told: list[tuple[int, int]],
                                                                                   low: float, high: float) -> None:
    policy = make_exit(kind)
    for accepted, of in told:
        policy.observe(accepted, of)
    assert policy.stop(min(low, high), 1) >= policy.stop(max(low, high), 1)


@pytest.mark.parametrize("kind", EXITS)
def test_two_of_a_kind_share_nothing(kind: str) -> None:
    taught, fresh = make_exit(kind), make_exit(kind)
    for _ in range(500):
        taught.observe(0, 4)
    assert [fresh.stop(c / 100, 1) for c in range(101)] == [make_exit(kind).stop(c / 100, 1) for c in range(101)]


def test_an_unknown_kind_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(DecodeError, match="no exit policy called 'adaptiv'; did you mean adaptive"):
        make_exit("adaptiv")


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in EXITS for n in make_exit(k).parameters()])
@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan"), float("inf")])
def test_a_parameter_outside_0_to_1_is_refused_by_name(kind: str, name: str, value: float) -> None:
    with pytest.raises(DecodeError, match=f"{name} is {value}"):
        make_exit(kind, **{name: value})


def test_a_draft_policy_makes_a_fresh_exit_each_time_and_says_what_it_is() -> None:
    policy = DraftPolicy(8, Adaptive(threshold=0.5, target_acceptance=0.8))
    taught = policy.make()
    taught.observe(0, 3)
    assert policy.make().parameters() == taught.parameters()
    assert (taught.parameters()["threshold"], taught.parameters()["target_acceptance"]) == (0.5, 0.8)
    assert str(policy) == "adaptive 0.5 for 0.8, up to 8"
    assert str(DraftPolicy(3)) == "fixed, up to 3"
