"""Calls in the vocabulary of Qwen2.5-Coder, which has a token for each mark of a call."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.pretrained import marks_of, packaged_file

from skipsearch.constraints import compile_constraint
from skipsearch.models.chat.formats import HERMES
from skipsearch.models.chat.tool_formats import call_constraint
from skipsearch.models.loading.gguf_model import read_gguf_tokenizer

ALIAS = "qwen2.5-coder-1.5b-instruct-gguf"
FILE = packaged_file(ALIAS)
pytestmark = marks_of(ALIAS, pytest.mark.large, "make test-large")
END = 151645  # <|im_end|>
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look_up"}}]


@pytest.mark.parametrize("text_before", [False, True])
def test_the_tokens_of_a_call_are_legal_to_the_end(text_before: bool) -> None:
    tokenizer, _ = read_gguf_tokenizer(str(FILE))
    marks = HERMES.find_marks(tokenizer)
    assert len(marks) == 2
    call = HERMES.write_call("look_up", {"word": "it"})
    tokens = [*tokenizer(call)["input_ids"], END]
    constraint = call_constraint(TOOLS, HERMES, marks, text_before=text_before)
    matcher = compile_constraint(constraint, tokenizer, 151936, (END,)).new_matcher()
    assert matcher.count_legal(tokens) == len(tokens)
