"""A constraint begins after the thinking, whose end may be a token or text."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers.marked_tokenizer import add_marks

from skipsearch.constraints import Matcher, compile_constraint
from skipsearch.core.constraint import Constraint, ConstraintAfterThinking
from skipsearch.engine import load_model
from skipsearch.models.chat.thinking import THINKING_FORMATS, ThinkingStart

MARKS = ("<think>", "</think>")
VOCAB, EOS = 4096, 0
ANSWER = {"grammar": 'start: "yes" | "no"'}


@cache
def tokenizer(has_marks: bool) -> Any:
    own = load_model("demo", engine="hf").tokenizer
    return add_marks(own, [*MARKS, "<other>"] if has_marks else ["<unused>"])


def start(has_marks: bool, begin: str | None, **kind: Any) -> Matcher:
    constraint = ConstraintAfterThinking(**(kind or ANSWER), begin=begin, end=MARKS[1])
    return compile_constraint(constraint, tokenizer(has_marks), VOCAB, (EOS,)).new_matcher()


def encode(text: str, has_marks: bool) -> list[int]:
    return list(tokenizer(has_marks)(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("has_marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("begin", "text", "is_legal"),
    [
        (None, "any {text}, é\n</think>\n\nyes", True),
        (None, "</think>no", True),
        (None, "so </think>\n\nmaybe", False),
        (None, "so </think>\n\n\n\n\n\nyes", False),
        (None, "so </think> no </think> yes", False),
        ("<think>", "<think>\nso\n</think>\n\nyes", True),
        ("<think>", "yes", True),
        ("<think>", "so</think>yes", False),
    ],
)
def test_the_thinking_is_free_and_the_answer_is_not(
    has_marks: bool, begin: str | None, text: str, is_legal: bool
) -> None:
    tokens = [*encode(text, has_marks), EOS]
    matcher = start(has_marks, begin)
    assert (matcher.count_legal(tokens) == len(tokens)) == is_legal
    if is_legal:
        matcher.advance(tokens)
        assert matcher.has_ended


def test_in_the_thinking_every_token_is_legal_but_the_end_of_the_answer() -> None:
    matcher, mask = start(True, None), np.zeros(VOCAB, dtype=bool)
    matcher.advance(encode("so<other> it", True))
    matcher.fill_mask(mask)
    assert not mask[EOS]
    assert mask[tokenizer(True).convert_tokens_to_ids([*MARKS, "<other>"])].all()
    half_characters = (VOCAB - mask.sum()) / VOCAB
    assert half_characters < 0.05


def test_a_mark_that_is_a_token_may_be_spelled_too() -> None:
    """The reader of the text cannot tell the difference, so the constraint must not."""
    spelled = [i for part in ("so </", "think", ">") for i in encode(part, True)]
    for answer, n_legal in (("yes", 3), ("maybe", 0)):
        tokens = encode(answer, True)
        matcher = start(True, None)
        matcher.advance(spelled)
        assert (matcher.count_legal(tokens) == len(tokens)) == bool(n_legal)


@pytest.mark.parametrize("n", range(1, 12))
def test_rolling_back_over_the_end_of_the_thinking(n: int) -> None:
    matcher, tokens = start(True, "<think>"), encode("<think>so</think>\nyes", True)
    states = []
    for token in tokens:
        mask = np.zeros(VOCAB, dtype=bool)
        matcher.fill_mask(mask)
        states.append(mask)
        matcher.advance([token])
    n = min(n, len(tokens))
    matcher.roll_back(n)
    mask = np.zeros(VOCAB, dtype=bool)
    matcher.fill_mask(mask)
    assert (mask == states[-n]).all()


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ({"json_schema": {"type": "array", "items": {"type": "integer"}}}, "[1, 2]"),
        ({"regex": "[a-c]/x"}, "b/x"),
        ({"grammar": 'root ::= "left" | "right"'}, "left"),
    ],
    ids=str,
)
def test_every_kind_of_constraint_may_follow(kind: dict[str, Any], answer: str) -> None:
    tokens = [*encode(f"so</think>\n{answer}", True), EOS]
    assert start(True, None, **kind).count_legal(tokens) == len(tokens)


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


@pytest.mark.parametrize(
    ("text", "is_legal"),
    [
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
            "<|channel|>final<|message|>yes",
            True,
        ),
        ("<|channel|>final<|message|>yes", True),
        ("<|channel|>analysis<|message|>So.<|end|>yes", False),
        ("<|channel|>final<|message|>maybe", False),
        ("yes", False),
    ],
)
@pytest.mark.parametrize("marks", [HARMONY, ("<unused>",)], ids=["tokens", "text"])
def test_an_answer_has_the_head_of_its_channel(
    marks: tuple[str, ...], text: str, is_legal: bool
) -> None:
    own = add_marks(load_model("demo", engine="hf").tokenizer, marks)
    constraint = ThinkingStart(THINKING_FORMATS[-1]).delay(Constraint(**ANSWER))
    matcher = compile_constraint(constraint, own, VOCAB, (EOS,)).new_matcher()
    tokens = [*own(text, add_special_tokens=False).input_ids, EOS]
    assert (matcher.count_legal(tokens) == len(tokens)) == is_legal


def test_constraints_that_differ_in_their_thinking_are_not_equal() -> None:
    plain = Constraint(**ANSWER)
    delayed = [ConstraintAfterThinking(**ANSWER, begin=begin, end="x") for begin in (None, "b")]
    assert len({plain, *delayed}) == 3
