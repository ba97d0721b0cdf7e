"""The index behind lookup: the longest suffix that stood in the text before, its latest place, and
what followed there.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.drafters.lookup.suffix_index import Match, SuffixIndex
from skipsearch.errors import DecodeError

HUGE = [
    0,
    1,
    -1,
    2**31,
    2**32,
    2**32 + 1,
    2**63,
    2**64 - 1,
    2**200,
]  # around what an edge's key shifts by, and beyond
max_matches = st.sampled_from([1, 2, 3, 5, 16])


def of_alphabet(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size - 1), max_size=60)


def periodic() -> st.SearchStrategy[list[int]]:
    """A few tokens again and again, and then something else: long matches that end."""
    few = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    return st.builds(
        lambda period, times, rest: period * times + rest + period * times,
        few,
        st.integers(1, 12),
        few,
    )


texts = st.one_of(
    of_alphabet(1),
    of_alphabet(2),
    of_alphabet(3),
    of_alphabet(8),
    st.lists(st.sampled_from(HUGE), max_size=60),
    periodic(),
)


def longest_latest(text: list[int], max_match: int) -> Match | None:
    """The definition, by trying every length and every place."""
    for length in range(min(max_match, len(text) - 1), 0, -1):
        for position in range(len(text) - 1, length - 1, -1):
            if text[position - length : position] == text[len(text) - length :]:
                return Match(length, position)
    return None


def copied_on(text: list[int], position: int, n: int) -> list[int]:
    """The definition: token after token, each put behind the text before the next is read."""
    grown = list(text)
    for place in range(position, position + n):
        grown.append(grown[place])
    return grown[len(text) :]


def indexed(text: list[int], max_match: int = 16) -> SuffixIndex:
    index = SuffixIndex(max_match)
    index.extend(text)
    return index


@with_examples(400)
@given(texts, max_matches)
def test_every_prefix_is_matched_as_the_definition_says(text: list[int], max_match: int) -> None:
    index = SuffixIndex(max_match)
    for end, token in enumerate(text, start=1):
        index.extend([token])
        assert len(index) == end
        assert index.longest_match() == longest_latest(text[:end], max_match)


@with_examples(200)
@given(texts, st.lists(st.integers(0, 60), max_size=6), max_matches)
def test_a_text_added_in_pieces_is_matched_as_if_token_by_token(
    text: list[int], cuts: list[int], max_match: int
) -> None:
    index = SuffixIndex(max_match)
    for begin, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        index.extend(iter(text[begin:end]))
        assert len(index) == end
        assert index.longest_match() == longest_latest(text[:end], max_match)


@with_examples(200)
@given(texts.filter(bool), st.data(), st.integers(0, 150))
def test_what_followed_goes_on_with_itself_where_the_text_ends(
    text: list[int], data: st.DataObject, n: int
) -> None:
    position = data.draw(st.integers(0, len(text) - 1))
    index = indexed(text)
    assert index.continuation(position, n) == copied_on(text, position, n)
    assert len(index) == len(text)  # a proposal is no text


def test_the_latest_of_equal_places_is_taken_and_a_longer_match_before_a_later_one() -> None:
    assert indexed([1, 2, 8, 1, 2, 9, 1, 2]).longest_match() == Match(length=2, position=5)
    assert indexed([1, 2, 8, 5, 2, 9, 1, 2]).longest_match() == Match(length=2, position=2)


def test_occurrences_may_overlap() -> None:
    assert indexed([7, 7, 7]).longest_match() == Match(length=2, position=2)


@pytest.mark.parametrize(
    ("max_match", "expected"),
    [(1, Match(1, 19)), (4, Match(4, 19)), (16, Match(16, 19)), (40, Match(19, 19))],
)
def test_no_more_than_max_match_tokens_are_looked_up(max_match: int, expected: Match) -> None:
    assert indexed([7] * 20, max_match).longest_match() == expected


def test_a_short_look_back_takes_a_later_place_where_only_the_last_token_fits() -> None:
    text = [1, 2, 3, 9, 3, 8, 1, 2, 3]
    assert indexed(text, max_match=1).longest_match() == Match(length=1, position=5)
    assert indexed(text, max_match=3).longest_match() == Match(length=3, position=3)


def test_a_periodic_text_is_proposed_to_full_length() -> None:
    index = indexed([5, 1, 2, 1, 2])
    found = index.longest_match()
    assert found == Match(length=2, position=3)
    assert index.continuation(found.position, 7) == [1, 2, 1, 2, 1, 2, 1]


def test_a_text_without_a_repetition_has_no_match() -> None:
    assert SuffixIndex().longest_match() is None
    assert indexed([3]).longest_match() is None
    assert indexed([1, 2, 1, 3]).longest_match() is None


def test_what_the_caller_does_with_its_list_later_changes_nothing() -> None:
    text = [1, 2, 3, 1, 2]
    index = indexed(text)
    text[2] = 99
    text.clear()
    assert index.longest_match() == Match(length=2, position=2)
    proposed = index.continuation(2, 3)
    assert proposed == [3, 1, 2]
    proposed.clear()
    assert index.continuation(2, 3) == [3, 1, 2]


@with_examples(50)
@given(of_alphabet(2), of_alphabet(3))
def test_two_texts_that_grow_by_turns_know_nothing_of_each_other(
    one: list[int], other: list[int]
) -> None:
    first, second = SuffixIndex(), SuffixIndex()
    for place in range(max(len(one), len(other))):
        first.extend(one[place : place + 1])
        second.extend(other[place : place + 1])
    assert (len(first), len(second)) == (len(one), len(other))
    assert first.longest_match() == longest_latest(one, 16)
    assert second.longest_match() == longest_latest(other, 16)


def test_integers_of_numpy_are_as_good_as_pythons() -> None:
    text = np.array([2**40, 5, 2**40, 5], dtype=np.int64)
    index = indexed([])
    index.extend(text)
    assert index.longest_match() == Match(length=2, position=2)
    assert [type(token) for token in index.continuation(2, 2)] == [int, int]


def test_a_token_that_is_no_integer_adds_nothing_of_its_piece() -> None:
    index = indexed([1, 2, 1])
    with pytest.raises(TypeError):
        index.extend([2, 1.5])  # type: ignore[list-item]
    assert len(index) == 3
    assert index.longest_match() == Match(length=1, position=1)


@pytest.mark.parametrize("max_match", [0, -3])
def test_a_look_back_of_no_token_is_refused(max_match: int) -> None:
    with pytest.raises(DecodeError, match=f"max_match is {max_match}; .* give 1 or more"):
        SuffixIndex(max_match)


@pytest.mark.parametrize("n", [0, -1, -5])
def test_no_tokens_are_proposed_where_none_are_asked_for(n: int) -> None:
    assert indexed([1, 2, 1, 2]).continuation(1, n) == []


@pytest.mark.parametrize("position", [-1, 3, 4])
def test_nothing_follows_outside_the_text(position: int) -> None:
    with pytest.raises(IndexError, match=f"position is {position}, and the text has 3 tokens"):
        indexed([1, 2, 3]).continuation(position, 2)


@with_examples(30)
@given(texts, max_matches)
def test_memory_grows_with_the_text_alone(text: list[int], max_match: int) -> None:
    index = indexed(text, max_match)
    assert len(index._ends) == len(index._depths) == len(index._edges) + 1 <= 2 * len(text) + 1
