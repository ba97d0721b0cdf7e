"""Thinking, read out of a text that arrives in parts of any size."""

from __future__ import annotations

import pytest
from helpers.letter_tokenizer import letter_tokenizer
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.models.chat.thinking import (
    THINKING_FORMATS,
    ThinkingFormat,
    ThinkingReader,
    ThinkingStart,
    detect_thinking,
)

TEXTS = [
    # text, whether the prompt ends inside the thinking, thinking, answer
    ("<think>\nso < it </ is\n</think>\n\nYes <b>", False, "so < it </ is", "Yes <b>"),
    ("so it is</think>Yes", True, "so it is", "Yes"),
    ("\n<think>\nso\n</think>\nYes\n", True, "so", "Yes\n"),
    ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
    ("so it is, and then </thin", True, "so it is, and then </thin", ""),
    ("<think>so it is\n", False, "so it is", ""),
    (" It begins with <think> and\n", False, "", " It begins with <think> and\n"),
    ("<thi", False, "", "<thi"),
    ("<think>a</think> b <think>c</think>", False, "a", "b <think>c</think>"),
    ("", True, "", ""),
]


@pytest.mark.parametrize("form", THINKING_FORMATS[:2], ids=str)
@pytest.mark.parametrize(("text", "is_open", "thought", "answer"), TEXTS)
def test_thinking_and_answer_do_not_depend_on_the_parts(
    form: ThinkingFormat, text: str, is_open: bool, thought: str, answer: str
) -> None:
    def with_marks(text: str) -> str:
        for plain, mark in zip(THINKING_FORMATS[0].marks, form.marks, strict=True):
            text = text.replace(plain, mark).replace(plain[:-1], mark[:-1])
        return text

    text, expected = with_marks(text), (with_marks(thought), with_marks(answer))

    @with_examples(40)
    @given(st.lists(st.integers(0, len(text)), max_size=8))
    def holds(cuts: list[int]) -> None:
        reader, read = ThinkingReader(ThinkingStart(form, is_open)), ("", "")
        ends = [*sorted(cuts), len(text)]
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            added = reader.feed(text[begin:end], last=i == len(ends) - 1)
            read = read[0] + added[0], read[1] + added[1]
        assert read == expected

    holds()


@pytest.mark.parametrize(
    ("template", "prompt", "expected"),
    [
        ("<think> </think>", "hello", (False, False)),
        ("<think> </think>", "hello<think>\n", (True, False)),
        ("<think> </think>", "<think>\n\n</think>\n\n", (False, True)),
        ("[THINK] [/THINK]", "<think>", (False, False)),
        ("<|channel|>analysis<|message|>", "<|start|>assistant", (False, False)),
        ("no marks but <|end|>", "<think>", None),
    ],
)
def test_the_end_of_the_prompt_says_whether_the_model_thinks_already(
    template: str, prompt: str, expected: tuple[bool, bool] | None
) -> None:
    class Tokenizer:
        def get_added_vocab(self) -> dict[str, int]:
            return {}

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    start = detect_thinking(Tokenizer(), template, [ord(c) for c in prompt])
    assert (None if start is None else (start.is_open, start.is_over)) == expected


HARMONY = THINKING_FORMATS[-1]
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"<|channel|>analysis<|message|>So.<|end|>{FINAL}Yes", "So.", f"{FINAL}Yes"),
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>analysis"
            f"<|message|>Or not.<|end|>{FINAL}Yes",
            "So.\nOr not.",
            f"{FINAL}Yes",
        ),
        ("<|channel|>analysis<|message|>So <|e", "So <|e", ""),
        ("<|channel|>final<|message|>Yes", "", "<|channel|>final<|message|>Yes"),
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assist", "So.", "<|start|>assist"),
    ],
)
def test_thinking_in_a_channel_may_go_on_in_another_message(
    text: str, thought: str, answer: str
) -> None:
    for size in range(1, len(text) + 1):
        reader, read = ThinkingReader(ThinkingStart(HARMONY)), ("", "")
        for at in range(0, len(text), size):
            added = reader.feed(text[at : at + size], last=at + size >= len(text))
            read = read[0] + added[0], read[1] + added[1]
        assert read == (thought, answer)


def test_marks_that_are_tokens_need_no_template() -> None:
    tokenizer = letter_tokenizer()
    assert detect_thinking(tokenizer, "", [0]) is None
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    start = detect_thinking(tokenizer, "", tokenizer("so[THINK]").input_ids)
    assert start == ThinkingStart(THINKING_FORMATS[1], is_open=True)
