from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.decoding.repetition import LoopDetector, RepeatDetector, find_loop_start

# A small alphabet, so that repetitions are common.
tokens = st.lists(st.integers(0, 2), max_size=40)


@given(tokens, st.integers(1, 6))
def test_the_detector_fires_exactly_at_each_repeated_ngram(sequence: list[int], n: int) -> None:
    detector = RepeatDetector(n)
    fired = [end for end, token in enumerate(sequence, start=1) if detector.push_token(token)]
    grams = [tuple(sequence[end - n : end]) for end in range(n, len(sequence) + 1)]
    assert fired == [index + n for index, gram in enumerate(grams) if gram in grams[:index]]


def test_an_ngram_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="n is 0"):
        RepeatDetector(0)


def loop_by_definition(sequence: list[int]) -> int | None:
    for end in range(1, len(sequence) + 1):
        for period in range(1, 65):
            size = max(3 * period, 48)
            tail = sequence[end - size : end] if size <= end else []
            if tail and tail[period:] == tail[:-period]:
                start = end - size
                while start and sequence[start - 1] == sequence[start - 1 + period]:
                    start -= 1
                return start
    return None


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=70),
    st.integers(1, 60),
)
def test_the_text_before_a_loop_is_what_the_definition_says(
    before: list[int], period: list[int], repetitions: int
) -> None:
    text = (before + period * repetitions)[:300]
    assert find_loop_start(text) == loop_by_definition(text)


@pytest.mark.parametrize("period", [1, 5, 16, 17, 64])
def test_a_loop_is_three_repetitions_of_up_to_64_tokens_and_48_tokens_in_all(period: int) -> None:
    before, size = [1000, 1001], max(3 * period, 48)
    text = [*before, *(i % period for i in range(size))]
    assert find_loop_start(text) == len(before)
    assert find_loop_start(text[:-1]) is None


def test_a_longer_period_and_a_repeated_line_of_code_are_no_loop() -> None:
    assert find_loop_start(list(range(65)) * 4) is None
    line = list(range(20))
    assert find_loop_start([*line, 100, *line, 101, *line, 102, *line]) is None


def test_the_detector_has_no_loop_start_before_a_loop() -> None:
    detector = LoopDetector()
    assert not detector.push_token(3)
    assert detector.loop_start is None
