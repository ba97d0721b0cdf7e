"""The memory of earlier answers: what it recalls by the definition, what it forgets, and readers
beside writers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Thread

import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.drafters.lookup.answer_memory import AnswerMemory

few = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def latest(answers: list[list[int]], tail: list[int]) -> tuple[int, list[int]]:
    """(tokens that match, all that followed them in their answer), by trying every length and
    place.
    """
    for length in range(min(16, len(tail)), 0, -1):
        for answer in reversed(answers):
            for end in range(len(answer), length - 1, -1):
                if answer[end - length : end] == tail[-length:]:
                    return length, answer[end:]
    return 0, []


@with_examples(300)
@given(st.lists(few, max_size=6), few, st.integers(0, 4), st.integers(1, 9))
def test_the_longest_end_of_a_text_is_recalled_with_what_followed_it(
    answers: list[list[int]], tail: list[int], longer: int, most: int
) -> None:
    memory = AnswerMemory(1000)
    for answer in answers:
        memory.add(answer)
    length, followed = latest(answers, tail)
    found = memory.longest_match(tail, longer, most)
    if length <= longer or not followed:
        assert found is None
    else:
        assert found is not None
        assert (found[0].length, found[1]) == (length, followed[:most])


@with_examples(60)
@given(st.lists(few, min_size=1, max_size=30))
def test_a_full_memory_forgets_the_oldest_answers_first(answers: list[list[int]]) -> None:
    memory = AnswerMemory(40)
    for n, answer in enumerate(answers):
        memory.add([1000 + n, *answer])
        assert len(memory) <= 2 * 40
    kept = [n for n in range(len(answers)) if memory.longest_match([1000 + n], 0, 1)]
    assert kept == list(range(kept[0], len(answers))), "the newest ones, without a gap"
    assert sum(len(answers[n]) + 2 for n in kept) > min(20, sum(len(a) + 2 for a in answers) - 1)


def test_of_an_answer_longer_than_the_memory_the_end_is_kept() -> None:
    memory = AnswerMemory(4)
    memory.add(range(10))
    found = memory.longest_match([6], 0, 9)
    assert found is not None
    assert found[1] == [7, 8, 9]
    assert memory.longest_match([5], 0, 9) is None


@pytest.fixture
def threads_in_quick_turn() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_threads_read_while_others_add(threads_in_quick_turn: None) -> None:
    memory, wrong = AnswerMemory(200), []

    def add(first: int) -> None:
        for _ in range(300):
            memory.add([first, first + 1, first + 2, first + 3])

    def read() -> None:
        for _ in range(2000):
            for first in (0, 10, 20):
                found = memory.longest_match([first, first + 1], 0, 2)
                if found is not None and found[1] not in ([first + 2], [first + 2, first + 3]):
                    wrong.append(found)

    threads = [
        *(Thread(target=add, args=(first,)) for first in (0, 10, 20)),
        Thread(target=read),
        Thread(target=read),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
