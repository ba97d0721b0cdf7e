"""Which drafted tokens are accepted: the greedy rule and the theorem of speculative sampling.

The checks compare exact probabilities.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.decoding.acceptance import accept_greedy, accept_sampled, residual

from .acceptance_checks import (
    P0,
    Q0,
    Q1,
    Row,
    Tokens,
    assert_same_distribution,
    check_acceptance,
    emitted,
    outcomes,
    text_distribution,
)

cuts = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
quarters = cuts.map(lambda c: (c[0] / 4, (c[1] - c[0]) / 4, (4 - c[1]) / 4))
tables = st.dictionaries(
    st.sampled_from([t for n in range(3) for t in product(range(3), repeat=n)]), quarters
)


def test_a_round_emits_texts_with_the_full_models_own_probabilities() -> None:
    check_acceptance()


@with_examples(15)
@given(tables, tables)
def test_whatever_p_and_q_are_two_drafted_tokens_and_the_third_are_distributed_as_p(
    p: dict[Tokens, Row], q: dict[Tokens, Row]
) -> None:
    def after(text: Tokens) -> Row:
        return p.get(text, P0)

    assert_same_distribution(
        emitted(3, 2, lambda t: q.get(t, Q0), after), text_distribution(3, 3, after)
    )


@with_examples(25)
@given(tables, st.tuples(st.integers(0, 2), st.integers(0, 2)))
def test_whatever_a_one_hot_draft_proposes_texts_are_distributed_as_p(
    p: dict[Tokens, Row], certain: Tokens
) -> None:
    def after(text: Tokens) -> Row:
        return p.get(text, P0)

    assert_same_distribution(emitted(3, 2, None, after, certain), text_distribution(3, 3, after))


def test_a_token_stands_with_the_smaller_of_1_and_p_over_q() -> None:
    for token, share in enumerate(
        (1.0, 1 / 3, 0.0)
    ):  # p = 1/2 1/4 1/4 over q = 1/4 3/4 0; the last is never drawn
        if Q0[token]:
            stands = sum(
                mass for text, mass in outcomes((token,), [Q0], [P0, P0]).items() if len(text) == 2
            )
            assert stands == pytest.approx(share)


def test_where_p_and_q_agree_every_token_stands() -> None:
    for drafted in product(range(3), repeat=2):
        assert all(len(text) == 3 for text in outcomes(drafted, [Q1, P0], [Q1, P0, Q0]))


def test_a_token_that_the_full_model_never_says_never_stands_and_is_never_drawn_in_its_place() -> (
    None
):
    found = outcomes((0,), [(0.5, 0.25, 0.25)], [(0.0, 0.25, 0.75), P0])
    assert found == {(2,): pytest.approx(1.0)}


def test_a_certain_token_stands_with_the_full_models_probability_of_it() -> None:
    found = outcomes((1,), None, [P0, Q1])
    assert sum(mass for text, mass in found.items() if len(text) == 2) == pytest.approx(P0[1])
    assert found[0,] == pytest.approx(0.5)
    assert found[2,] == pytest.approx(0.25)


def test_nothing_behind_a_rejected_token_stands() -> None:
    found = outcomes((0, 1), [P0, P0], [(0.0, 0.5, 0.5), (0.0, 1.0, 0.0), P0])
    assert {len(text) for text in found} == {1}


def test_with_nothing_drafted_a_token_is_drawn_from_p() -> None:
    for q in (None, torch.zeros(0, 3)):
        accepted, token = accept_sampled(
            torch.zeros(0, dtype=torch.long), q, torch.tensor([[0.0, 1.0, 0.0]]), torch.Generator()
        )
        assert (accepted, token) == (0, 1)


def test_the_residual_is_what_p_has_more_than_q_and_sums_to_one() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    torch.testing.assert_close(residual(p, q, torch.tensor(1)), torch.tensor([0.75, 0.0, 0.25]))


def test_the_residual_of_a_one_hot_draft_is_p_without_that_token() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    torch.testing.assert_close(residual(p, None, torch.tensor(0)), torch.tensor([0.0, 0.6, 0.4]))
    assert p.tolist() == pytest.approx([0.5, 0.3, 0.2]), "p is not changed on the way"


def test_the_residual_is_p_where_rounding_leaves_nothing() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    assert torch.equal(residual(p, p, torch.tensor(1)), p)
    assert torch.equal(
        residual(torch.tensor([0.0, 1.0]), None, torch.tensor(1)), torch.tensor([0.0, 1.0])
    )


def test_a_generator_repeats_what_is_accepted() -> None:
    p, q = torch.full((4, 5), 0.2), torch.tensor([[0.6, 0.1, 0.1, 0.1, 0.1]] * 3)
    drafted = torch.tensor([0, 0, 0])
    runs = [
        [accept_sampled(drafted, q, p, g) for _ in range(50)]
        for g in (torch.Generator().manual_seed(3) for _ in range(2))
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 5


@with_examples(200)
@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_greedy_acceptance_stops_at_the_first_token_the_full_model_does_not_choose(
    drafted: list[int], chosen: list[int]
) -> None:
    chosen = chosen[: len(drafted) + 1]
    logits = torch.nn.functional.one_hot(torch.tensor(chosen), 4).double()
    accepted, following = accept_greedy(torch.tensor(drafted, dtype=torch.long), logits)
    text = [*drafted[:accepted], following]
    assert text == chosen[: accepted + 1]
    assert accepted == len(drafted) or drafted[accepted] != chosen[accepted]
