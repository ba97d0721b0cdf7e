"""The grammar of forced calls: every form's own calls are legal, token by token, to the end."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from helpers.marked_tokenizer import add_marks

from skipsearch.constraints import compile_constraint
from skipsearch.engine import load_model
from skipsearch.models.chat.formats import HERMES, QWEN3_CODER, TOOL_FORMATS, ToolFormat
from skipsearch.models.chat.tool_formats import Fields, call_constraint

from .tool_form_samples import SPECIAL_TOKENS

VOCAB, EOS = 4096, 0
TOOLS: list[Any] = [
    {
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "n": {"type": "integer"},
                    "kind": {"enum": ["x", "y"]},
                    "list": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["a", "n"],
                "additionalProperties": False,
            },
        }
    },
    {"function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    {"function": {"name": "h"}},
]
ARGUMENTS = {"a": 'one\n"two"', "n": 3, "kind": "y", "list": [1, 2]}
CASES = [
    pytest.param(form, marks, id=f"{form.name}-{bool(marks)}")
    for form in TOOL_FORMATS
    for marks in dict.fromkeys([(), SPECIAL_TOKENS.get(form.name, ())])
]


@cache
def tokenizer(marks: tuple[str, ...]) -> Any:
    own = load_model("demo", engine="lean").tokenizer
    return add_marks(own, marks) if marks else own


def count_legal(
    form: ToolFormat, marks: tuple[str, ...], text: str, **options: Any
) -> tuple[int, int]:
    """Return (legal tokens, tokens) of a text and its end."""
    tokens = [*tokenizer(marks)(text)["input_ids"], EOS]
    constraint = call_constraint(TOOLS, form, form.find_marks(tokenizer(marks)), **options)
    compiled = compile_constraint(constraint, tokenizer(marks), VOCAB, (EOS,))
    return compiled.new_matcher().count_legal(tokens), len(tokens)


def test_a_token_of_its_own_may_end_a_value_after_a_newline() -> None:
    fields = Fields("<parameter=$key>\n$value\n</value><end>\n")
    form, marks = replace(QWEN3_CODER, also=(), fields=fields), ("<end>",)
    legal, total = count_legal(form, marks, form.write_calls([("f", {"a": "x", "n": 1})]))
    assert legal == total


def test_a_separator_may_be_a_token_of_its_own() -> None:
    form = replace(HERMES, separator="<next>")
    assert form.find_marks(tokenizer(("<next>",))).keys() == {"<next>"}


@pytest.mark.parametrize(("form", "marks"), CASES)
def test_the_calls_that_a_form_writes_are_legal_and_others_are_not(
    form: ToolFormat, marks: tuple[str, ...]
) -> None:
    few = {"a": "x", "n": 1}
    calls = [("f", ARGUMENTS), ("g", {}), ("f", few), ("h", {"any_key": "x"})]
    legal, n_tokens = count_legal(form, marks, form.write_calls(calls))
    assert legal == n_tokens
    for wrong in ([("f", {"a": "x", "n": "y"})], [("f", {"a": "x"})], [("k", {})]):
        legal, n_tokens = count_legal(form, marks, form.write_calls(wrong))
        assert legal < n_tokens
    legal, n_tokens = count_legal(form, marks, form.write_calls(calls[:2]), several=False)
    assert legal < n_tokens


@pytest.mark.parametrize(("form", "marks"), [c for c in CASES if c.values[0].trigger])
def test_text_may_stand_before_a_strict_call(form: ToolFormat, marks: tuple[str, ...]) -> None:
    for text in ("Just text.", "Text.\n" + form.write_calls([("f", ARGUMENTS)])):
        legal, n_tokens = count_legal(form, marks, text, text_before=True)
        assert legal == n_tokens
    wrong = form.write_calls([("f", {"a": "x", "n": "y"})])
    legal, n_tokens = count_legal(form, marks, f"Text.\n{wrong}", text_before=True)
    assert legal < n_tokens
