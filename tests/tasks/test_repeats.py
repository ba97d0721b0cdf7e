from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.decoding.repetition import RepeatDetector, find_first_repeat

# A small alphabet, so that repetitions are common.
tokens = st.lists(st.integers(0, 2), max_size=40)


def by_definition(sequence: list[int], n: int) -> int | None:
    for end in range(n + 1, len(sequence) + 1):
        gram = sequence[end - n : end]
        if any(sequence[start : start + n] == gram for start in range(end - n)):
            return end
    return None


@given(tokens, st.integers(1, 6))
def test_first_repeat_is_the_end_of_the_first_ngram_that_stood_before(
    sequence: list[int], n: int
) -> None:
    assert find_first_repeat(sequence, n) == by_definition(sequence, n)


@given(tokens, st.integers(1, 6))
def test_the_detector_fires_exactly_at_each_repeated_ngram(sequence: list[int], n: int) -> None:
    detector = RepeatDetector(n)
    fired = [end for end, token in enumerate(sequence, start=1) if detector.push_token(token)]
    grams = [tuple(sequence[end - n : end]) for end in range(n, len(sequence) + 1)]
    assert fired == [index + n for index, gram in enumerate(grams) if gram in grams[:index]]


def test_overlapping_occurrences_count() -> None:
    assert find_first_repeat([7] * 7, 6) == 7
    assert find_first_repeat([7] * 6, 6) is None


def test_an_ngram_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="n is 0"):
        RepeatDetector(0)
