"""Calls of tools, read out of an answer that arrives in parts of any size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.models.chat.call_reader import CallDelta, CallReader, SchemaCallReader, merge_deltas
from skipsearch.models.chat.formats import (
    GLM,
    HERMES,
    TOOL_FORMATS,
    UNKNOWN_FORMS,
    ToolFormat,
    detect_tool_format,
)
from skipsearch.models.chat.tool_formats import Fields

from .tool_form_samples import ANSWERS, FORMS, TEMPLATES, TOOLS, Calls


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


@pytest.mark.parametrize(
    ("name", "answer", "content", "calls"), ANSWERS, ids=lambda value: f"{value!s:.30}"
)
def test_content_and_calls_do_not_depend_on_the_parts(
    name: str, answer: str, content: str, calls: Calls
) -> None:
    def check(parts: list[str]) -> None:
        assert read(CallReader(FORMS[name], tools=TOOLS), parts) == (content, calls)

    check([answer])
    check(list(answer))

    @with_examples(8)
    @given(st.lists(st.integers(1, 12), min_size=len(answer), max_size=len(answer)))
    def holds(sizes: list[int]) -> None:
        parts, at = [], 0
        for size in sizes:
            parts.append(answer[at : at + size])
            at += size
            if at >= len(answer):
                break
        check(parts)

    holds()


def test_every_form_has_a_recorded_answer_and_a_template() -> None:
    assert {name for name, *_ in ANSWERS} == FORMS.keys(), "each form has an entry in ANSWERS"
    assert TEMPLATES.keys() >= FORMS.keys(), "each form has an entry in TEMPLATES"


@pytest.mark.parametrize(
    ("trigger", "call"),
    [
        ("call name", "<call name=$name>$arguments"),
        ('<call name="$name', '<call name="$name">$arguments'),
        ("", "<call>$arguments"),
        ("", "<call $name>$args"),
        ("", "<call>$arguments</call $name>"),
        ("", '{"name": "$name", "arguments": $arguments, "id": "$id"}'),
    ],
)
def test_a_form_that_breaks_a_rule_is_refused(trigger: str, call: str) -> None:
    with pytest.raises(ValueError, match="of the form Mine is "):
        ToolFormat("Mine", call, (), trigger=trigger)


def test_fields_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match="after fields it ends with a mark"):
        ToolFormat("Mine", "<$name>$arguments", (), fields=Fields("<$key>$value</>"))
    with pytest.raises(ValueError, match="the end of a name would not be known"):
        ToolFormat("Mine", "<call:$name $arguments>", (), fields=Fields("$key=<v>$value</v>"))
    for field, separator, quote in (
        ("$key=$value", ", ", '"'),
        ("$key:$value", ";", "'"),
        ("<$key>$value", "", ""),
        ("<$key>$value</>", ", ", ""),
        ("<$key> $value</>", "", ""),
        ("<$key>$value </>", "", ""),
        ("<$value>$key</>", "", ""),
    ):
        with pytest.raises(ValueError, match="a field is "):
            Fields(field, separator, quote)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_calls_that_a_form_writes_are_read_back(form: ToolFormat) -> None:
    arguments = {"a": 'é " } ] \n', "n": 3, "list": ["x, y", "z"]}
    called = [("f", arguments), ("g", {}), ("get_weather", {"city": "A"})]
    content, calls = read(CallReader(form, tools=TOOLS), list(form.write_calls(called)))
    assert content == ""
    assert [(name, json.loads(text)) for name, text in calls.values()] == called


def test_a_name_is_complete_before_a_field_on_a_line_of_its_own() -> None:
    form = replace(GLM, fields=Fields("\n<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>"))
    called = [("get_weather", {"city": "A"})]
    _, calls = read(CallReader(form), list(form.write_calls(called)))
    assert [(name, json.loads(text)) for name, text in calls.values()] == called


@pytest.mark.parametrize("indent", [None, 2])
def test_white_space_that_a_form_lacks_is_read_next_to_brackets(indent: int | None) -> None:
    form = ToolFormat(
        "Mine",
        '{"type": "function", "function": {"name": "$name", "arguments": $arguments}}',
        ("<calls>",),
        begin="<calls>[",
        separator=", ",
        end="]</calls>",
    )
    functions = [{"name": name, "arguments": {"a": [1]}} for name in "fg"]
    listed = json.dumps([{"type": "function", "function": f} for f in functions], indent=indent)
    content, calls = read(CallReader(form), list(f"Wait.\n<calls>\n{listed}\n</calls>"))
    assert content == "Wait."
    assert [(name, json.loads(text)) for name, text in calls.values()] == [
        ("f", {"a": [1]}),
        ("g", {"a": [1]}),
    ]


@pytest.mark.parametrize(
    "answer", ['<call> f({"a": [1]})</call>', '<call>f ( {"a": [1]}\n) </call>']
)
def test_round_brackets_may_have_white_space_next_to_them(answer: str) -> None:
    form = ToolFormat("Mine", "<call>$name($arguments)</call>", ("<call>",), trigger="<call>")
    assert read(CallReader(form), list(answer)) == ("", {0: ("f", '{"a": [1]}')})


def test_a_name_ends_before_the_round_bracket_of_its_arguments() -> None:
    form = ToolFormat("Mine", "<call>$name($arguments)</call>", (), fields=Fields("$key=$value;"))
    called = [("f", {"a": "print(1)", "b": "x"})]
    _, calls = read(CallReader(form), [form.write_calls(called)])
    assert [(name, json.loads(text)) for name, text in calls.values()] == called


def test_arguments_in_json_are_returned_while_they_grow() -> None:
    reader, seen = CallReader(HERMES), ""
    for character in '<tool_call>\n{"name": "f", "arguments": {"a": "long tex':
        seen += "".join(delta.arguments for delta in reader.feed(character)[1])
    assert seen == '{"a": "long tex'


def test_fenced_text_is_held_back_only_until_it_is_decided() -> None:
    reader = CallReader(HERMES, tools=TOOLS)
    assert reader.feed("```json\n")[0] == ""
    assert reader.feed('{"name": "Ada", ')[0] == ""
    assert reader.feed('"age": 36}')[0] == '```json\n{"name": "Ada", "age": 36}'
    assert CallReader(HERMES, tools=TOOLS).feed("```python\nx")[0] == "```python\nx"
    assert CallReader(HERMES).feed('```json\n{"name": "g", "arguments": {')[0] != ""


def test_calls_beyond_the_limit_are_dropped() -> None:
    answer = "".join(HERMES.write_call(name, {}) for name in "abc")
    assert read(CallReader(HERMES, max_calls=1), [answer]) == ("", {0: ("a", "{}")})


@pytest.mark.parametrize("name", FORMS)
def test_a_template_names_its_form(name: str) -> None:
    form = detect_tool_format(f"{{{{ tools }}}} {TEMPLATES[name]}")
    assert form is not None
    assert form.name == name


@pytest.mark.parametrize(
    "template", ["{{ messages }}", *(f'<tool_call> "parameters" {mark}' for mark in UNKNOWN_FORMS)]
)
def test_a_template_of_another_form_names_none(template: str) -> None:
    assert detect_tool_format(template) is None


def test_one_event_has_one_delta_of_a_call() -> None:
    deltas = [CallDelta(0, "f"), CallDelta(0, arguments="{"), CallDelta(1, "g", "{}")]
    assert merge_deltas(deltas) == [CallDelta(0, "f", "{"), CallDelta(1, "g", "{}")]


class Parsing:
    """A tokenizer with a response template, as transformers has it."""

    def parse_response(self, text: str, *, prefix: str, tools: list[Any]) -> dict[str, Any]:
        before, _, name = text.partition("!")
        if not name:
            raise ValueError(text)
        return {"content": before, "tool_calls": [{"function": {"name": name, "arguments": {}}}]}


def test_a_tokenizers_own_response_template_reads_the_complete_answer() -> None:
    assert read(SchemaCallReader(Parsing()), ["so", "!f"]) == ("so", {0: ("f", "{}")})
    assert read(SchemaCallReader(Parsing()), ["no ", "call"]) == ("no call", {})
