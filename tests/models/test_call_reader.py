"""Calls of tools, read out of an answer that arrives in parts of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.models.chat.call_reader import CallDelta, CallReader, SchemaCallReader, merge_deltas
from skipsearch.models.chat.tool_formats import (
    HERMES,
    LLAMA_3,
    MISTRAL,
    TOOL_FORMATS,
    ToolFormat,
    detect_tool_format,
)

Calls = dict[int, tuple[str, str]]


def read(reader: Any, parts: list[str]) -> tuple[str, Calls]:
    """Return (content, calls) of an answer in parts."""
    content, calls = "", Calls()
    for i, part in enumerate(parts):
        added, deltas = reader.feed(part, last=i == len(parts) - 1)
        content += added
        for delta in deltas:
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name or delta.name or "", arguments + delta.arguments)
    return content, calls


NESTED = '{"a": "}\\"<tool_call>[{", "b": [1, {"c": 2}]}'
ANSWERS: list[tuple[ToolFormat, str, str, Calls]] = [
    (
        HERMES,
        f'Wait.\n<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": 1}, "name": "g"}\n</tool_call>',
        "Wait.",
        {0: ("f", NESTED), 1: ("g", '{"x": 1}')},
    ),
    (HERMES, "a < b, <tool and </tool_call>", "a < b, <tool and </tool_call>", {}),
    (HERMES, "<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>", {}),
    (
        HERMES,
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        {},
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", {0: ("f", '{"a": 1')}),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", {0: ("f", "{}")}),
    (LLAMA_3, '{"name": "f", "parameters": {"a": 1}}', "", {0: ("f", '{"a": 1}')}),
    (
        LLAMA_3,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "",
        {0: ("f", "{}"), 1: ("g", "{}")},
    ),
    (LLAMA_3, 'It is {"name": 1}', 'It is {"name": 1}', {}),
    (LLAMA_3, '{"answer": 42}', '{"answer": 42}', {}),
    (
        MISTRAL,
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (MISTRAL, "[1, 2] is a list", "[1, 2] is a list", {}),
]


@pytest.mark.parametrize(
    ("form", "answer", "content", "calls"), ANSWERS, ids=lambda value: f"{value!s:.30}"
)
def test_content_and_calls_do_not_depend_on_the_parts(
    form: ToolFormat, answer: str, content: str, calls: Calls
) -> None:
    @with_examples(60)
    @given(st.lists(st.integers(1, 12), min_size=len(answer), max_size=len(answer)))
    def holds(sizes: list[int]) -> None:
        parts, at = [], 0
        for size in sizes:
            parts.append(answer[at : at + size])
            at += size
            if at >= len(answer):
                break
        assert read(CallReader(form), parts) == (content, calls)

    holds()
    assert read(CallReader(form), [answer]) == (content, calls)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a_call_that_a_form_writes_is_read_back(form: ToolFormat) -> None:
    written = form.write_call("f", {"text": 'é " } ]', "n": [1, None]})
    answer = f"[{written}]" if form.list_of_calls else written
    _, calls = read(CallReader(form), list(answer))
    name, arguments = calls[0]
    assert (name, json.loads(arguments)) == ("f", {"text": 'é " } ]', "n": [1, None]})


def test_calls_beyond_the_limit_are_dropped() -> None:
    answer = "".join(HERMES.write_call(name, {}) for name in "abc")
    assert read(CallReader(HERMES, max_calls=1), [answer]) == ("", {0: ("a", "{}")})


def test_a_template_names_its_form() -> None:
    assert detect_tool_format("… <tool_call> …") is HERMES
    assert detect_tool_format("… [TOOL_CALLS] …") is MISTRAL
    assert detect_tool_format('… "parameters" …') is LLAMA_3
    assert detect_tool_format("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}") is None


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>\n{{ value }}\n</parameter>",
        "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>",
    ],
)
def test_calls_in_xml_are_not_taken_for_those_of_hermes(call: str) -> None:
    assert detect_tool_format(call) is None
    assert detect_tool_format("{{ messages }}") is None


def test_one_event_has_one_delta_of_a_call() -> None:
    deltas = [CallDelta(0, "f"), CallDelta(0, arguments="{"), CallDelta(1, "g", "{}")]
    assert merge_deltas(deltas) == [CallDelta(0, "f", "{"), CallDelta(1, "g", "{}")]


class Parsing:
    """A tokenizer with a response schema, as transformers has it."""

    def parse_response(self, text: str) -> dict[str, Any]:
        before, _, name = text.partition("!")
        if not name:
            raise ValueError(text)
        return {"content": before, "tool_calls": [{"function": {"name": name, "arguments": {}}}]}


def test_a_tokenizers_own_response_schema_reads_the_complete_answer() -> None:
    assert read(SchemaCallReader(Parsing()), ["so", "!f"]) == ("so", {0: ("f", "{}")})
    assert read(SchemaCallReader(Parsing()), ["no ", "call"]) == ("no call", {})
