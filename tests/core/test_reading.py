"""What a draft reads: number formats, and vocabularies as a profile stores them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from skipsearch.core.reading import READ_ALL, Reading, Vocabulary, format_ids

ids = st.sets(st.integers(0, 300_000), max_size=60)


@given(ids, st.integers(0, 500))
def test_a_vocabulary_has_the_lowest_ids_and_the_listed_tokens(tokens: set[int], low: int) -> None:
    vocabulary = Vocabulary.from_ids(tokens, low)
    assert vocabulary.token_ids() == tuple(sorted({*tokens, *range(low)}))
    assert Vocabulary.model_validate(vocabulary.model_dump(mode="json")) == vocabulary


@given(ids)
def test_the_text_of_token_ids_depends_on_the_set_alone(tokens: set[int]) -> None:
    assert format_ids(sorted(tokens, reverse=True)) == format_ids(tokens)


def test_neighbouring_ids_are_written_as_a_range() -> None:
    assert format_ids([9, 14, 12, 13, 20, 21]) == "9 12-14 20-21"


@pytest.mark.parametrize(
    "text", ["9 x", "14-12", "3 3", "5 1-6", "-4", "1,2", "1-", "99999999", "0-99999999", "1" * 9]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Vocabulary(lowest=0, tokens=text)


def test_a_hostile_text_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(ValidationError):
        Vocabulary(lowest=0, tokens=" ".join(["0-9999999"] * 3000))


def test_a_reading_says_what_is_read() -> None:
    few = Vocabulary(lowest=1000, tokens="4000-4001")
    assert str(READ_ALL) == "all of the model"
    assert READ_ALL.is_everything
    assert str(Reading("int8", few)) == "int8, 1,002 tokens of the vocabulary"
    assert not Reading("int8").is_everything
    assert not Reading(vocabulary=few).is_everything
    assert Reading("int5").bits == 5
    assert READ_ALL.bits is None
