"""Calls of tools, read out of an answer that arrives in parts of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.models.chat.call_reader import CallDelta, CallReader, SchemaCallReader, merge_deltas
from skipsearch.models.chat.formats import (
    HERMES,
    TOOL_FORMATS,
    UNKNOWN_FORMS,
    ToolFormat,
    detect_tool_format,
)
from skipsearch.models.chat.tool_formats import Fields

Calls = dict[int, tuple[str, str]]
FORMS = {form.name: form for form in TOOL_FORMATS}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "n": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "list": {"type": "array", "items": {"type": "string"}},
                    "kind": {"enum": ["x", "7"]},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]


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
# (form, answer, content, calls)
ANSWERS: list[tuple[str, str, str, Calls]] = [
    (
        "Hermes and Qwen",
        f'Wait.\n<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": 1}, "name": "g"}\n</tool_call>',
        "Wait.",
        {0: ("f", NESTED), 1: ("g", '{"x": 1}')},
    ),
    ("Hermes and Qwen", "a < b, <tool and </tool_call>", "a < b, <tool and </tool_call>", {}),
    (
        "Hermes and Qwen",
        "<tool_call>\nno JSON\n</tool_call>",
        "<tool_call>\nno JSON\n</tool_call>",
        {},
    ),
    (
        "Hermes and Qwen",
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        {},
    ),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {"a": 1', "", {0: ("f", '{"a": 1')}),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {}}', "", {0: ("f", "{}")}),
    (  # a limit cut the second call off
        "Hermes and Qwen",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"name": "g',
        "",
        {0: ("f", "{}")},
    ),
    ("Llama 3", '{"name": "f", "parameters": {}}; {"name": "g', "", {0: ("f", "{}")}),
    ("Hermes and Qwen", '<tool_call>{"name": "g"}</tool_call>', "", {0: ("g", "{}")}),
    (
        "Hermes and Qwen",
        '<tool_call>\n{{"name": "g", "arguments": {"x": 1}}}\n</tool_call>',
        "",
        {0: ("g", '{"x": 1}')},
    ),
    *(  # doubled brackets, as Qwen 2.5's template shows them, and too few or too many at the end
        ("Hermes and Qwen", f"{before}{call}{after}", "", {0: ("f", '{"a": "}}"}')})
        for before, after in (
            ("", ""),
            ("```json\n", "\n```"),
            ("```", "```"),
            ("<tools>\n", "\n</tools>"),
            ("<tool_call>\n", "\n</tool_call>"),
        )
        for call in (
            '{{"name": "f", "arguments": {"a": "}}"}}}',
            '{{"name": "f", "arguments": {"a": "}}"}}}}',
            '{{"name": "f", "arguments": {"a": "}}"}}',
            '{{"name": "f", "arguments": {{"a": "}}"}}}}',
            '{"name": "f", "arguments": {{"a": "}}"}}}',
            '{ {"arguments": {"a": "}}"}, "name": "f"} }',
        )
    ),
    (
        "Hermes and Qwen",
        '{{"name": "g", "arguments": {}}}\n{{"name": "g", "arguments": {{"x": {{"y": 1}}}}}}\nSo.',
        "So.",
        {0: ("g", "{}"), 1: ("g", '{"x": {"y": 1}}')},
    ),
    # Calls without tags are read if they fit a tool.
    (
        "Hermes and Qwen",
        '```json\n{\n  "name": "f",\n  "arguments": {\n    "a": "```"\n  }\n}\n```',
        "",
        {0: ("f", '{"a": "```"}')},
    ),
    (
        "Hermes and Qwen",
        'I do.\n```json\n{"name": "g", "arguments": {}}\n{"name": "f", "arguments": {"a": "x"}}\n'
        "```\nDone.",
        "I do.\nDone.",
        {0: ("g", "{}"), 1: ("f", '{"a": "x"}')},
    ),
    ("Hermes and Qwen", '{"name": "g", "arguments": {"x": 1}}', "", {0: ("g", '{"x": 1}')}),
    *(
        ("Hermes and Qwen", text, text, Calls())
        for text in (
            '```json\n{"name": "f", "arguments": {"n": 1}}\n```',  # `a` is missing
            '```json\n{"name": "h", "arguments": {}}\n``` is JSON',  # no tool has this name
            '{{"name": "h", "arguments": {}}} is JSON',
            '{{"name": "f", "arguments": {"n": 1}}}',
            '```json\n{{"name": "Ada"}}\n```',
            "{{ name }} is a template",
            '```json\n{"name": "Ada", "age": 36}\n```',
            '```json\n{"name": "g", "arguments": {"x": ',
            "```python\nprint(1)\n```",
            '{"name": "Ada"} and {"name": "g", "arguments": {}}',
        )
    ),
    (
        "Qwen3-Coder",
        "So.\n<tool_call>\n<function=f>\n<parameter=a>\nif x < 3:\n    pass\n\n</parameter>\n"
        "<parameter=n>\n7\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n"
        '<parameter=list>\n["x"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "So.",
        {
            0: ("f", '{"a": "if x < 3:\\n    pass\\n", "n": 7, "b": true, "list": ["x"]}'),
            1: ("g", "{}"),
        },
    ),
    (  # the model forgets the first tag
        "Qwen3-Coder",
        "<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        "",
        {0: ("f", '{"a": "7"}')},
    ),
    ("Qwen3-Coder", "The tag <tool_call> is a tag.", "The tag <tool_call> is a tag.", {}),
    (
        "MiniMax M2",
        'So.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">if x < 3:\n    pass\n'
        '</parameter>\n<parameter name="n">7</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
        "</minimax:tool_call>",
        "So.",
        {0: ("f", '{"a": "if x < 3:\\n    pass\\n", "n": 7}'), 1: ("g", "{}")},
    ),
    (
        "GLM",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>kind</arg_key>\n"
        "<arg_value>7</arg_value>\n<arg_key>maybe</arg_key>\n<arg_value>null</arg_value>\n"
        "</tool_call><tool_call>g</tool_call>",
        "",
        {0: ("f", '{"a": "7", "kind": "7", "maybe": null}'), 1: ("g", "{}")},
    ),
    (
        "GLM",
        "<tool_call>f<arg_key>n</arg_key><arg_value>7</arg_value></tool_call>",
        "",
        {0: ("f", '{"n": 7}')},
    ),
    ("Llama 3", '{"name": "f", "parameters": {"a": 1}}', "", {0: ("f", '{"a": 1}')}),
    (
        "Llama 3",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; '
        '{"name": "g", "parameters": {}}',
        "",
        {0: ("f", "{}"), 1: ("g", "{}")},
    ),
    *(
        ("Llama 3", call, "", {0: ("f", '{"a": 1}')})
        for call in (
            '{{"name": "f", "parameters": {"a": 1}}}',
            '{"name": "f", "parameters": {{"a": 1}}}',
        )
    ),
    ("Llama 3", 'It is {"name": 1}', 'It is {"name": 1}', {}),
    ("Llama 3", '{"answer": 42}', '{"answer": 42}', {}),
    (
        "Mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    ("Mistral", '[{"name": "f", "arguments": {"a": 1}}]', "", {0: ("f", '{"a": 1}')}),
    ("Mistral", "[1, 2] is a list", "[1, 2] is a list", {}),
    (
        "Mistral with [ARGS]",
        'Yes.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "Yes.",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (
        "Mistral with [CALL_ID]",
        '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}',
        "",
        {0: ("f", '{"a": 1}')},
    ),
    (
        "DeepSeek V3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        {0: ("f", '{"a": "```"}'), 1: ("g", "{}")},
    ),
    (
        "DeepSeek V3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (
        "Kimi K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        {0: ("f", '{"a": 1}'), 1: ("g", "{}")},
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>A call of f.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        {0: ("f", '{"a": 1}')},
    ),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
        "<|channel|>commentary json<|message|>{}<|call|>",
        "I look.",
        {0: ("f", "{}")},
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is 4.<|return|>",
        "It is 4.",
        {},
    ),
    (
        "FunctionGemma",
        '<start_function_call>call:f{a:<escape>it\'s {a: 1}, "b"<escape>,n:7,'
        "list:[<escape>x<escape>]}<end_function_call>"
        "<start_function_call>call:g{}<end_function_call>",
        "",
        {0: ("f", '{"a": "it\'s {a: 1}, \\"b\\"", "n": 7, "list": ["x"]}'), 1: ("g", "{}")},
    ),
    (
        "Gemma 4",
        '<|tool_call>call:f{a:<|"|>x<|"|>,o:{k:true,l:<|"|>y<|"|>}}<tool_call|>',
        "",
        {0: ("f", '{"a": "x", "o": {"k": true, "l": "y"}}')},
    ),
    ("Gemma 4", "<|tool_call>call:f{a:<tool_call|> no", "<|tool_call>call:f{a:<tool_call|> no", {}),
]


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
    ],
)
def test_a_form_that_breaks_a_rule_is_refused(trigger: str, call: str) -> None:
    with pytest.raises(ValueError, match="of the form Mine is "):
        ToolFormat("Mine", call, (), trigger=trigger)


def test_fields_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match="after fields it ends with a mark"):
        ToolFormat("Mine", "<$name>$arguments", (), fields=Fields("<$key>$value</>"))
    for field, separator, quote in (
        ("$key=$value", ", ", '"'),
        ("$key:$value", ";", "'"),
        ("<$key>$value", "", ""),
        ("<$value>$key</>", "", ""),
    ):
        with pytest.raises(ValueError, match="a field is "):
            Fields(field, separator, quote)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_calls_that_a_form_writes_are_read_back(form: ToolFormat) -> None:
    arguments = {"a": 'é " } ] \n', "n": 3, "list": ["x, y", "z"]}
    written = form.write_calls([("f", arguments), ("g", {})])
    content, calls = read(CallReader(form, tools=TOOLS), list(written))
    assert content == ""
    assert [(name, json.loads(text)) for name, text in calls.values()] == [
        ("f", arguments),
        ("g", {}),
    ]


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


TEMPLATES = {
    "Hermes and Qwen": '<tool_call>\n{"name": <function-name>}\n</tool_call> {"parameters": {}}',
    "Qwen3-Coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>\n{{ value }}",
    "GLM": "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}",
    "Llama 3": 'Respond in the format {"name": function name, "parameters": dictionary}',
    "Mistral": '{{ "[TOOL_CALLS][" }}{% for call in calls %}{{ call | tojson }}',
    "Mistral with [ARGS]": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "Mistral with [CALL_ID]": "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}",
    "DeepSeek V3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>\n```json",
    "DeepSeek V3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "MiniMax M2": '<minimax:tool_call>\n<invoke name="{{ name }}">\n<parameter name="{{ key }}">',
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}",
    "gpt-oss": "<|start|>assistant to={{ 'functions.' + name }}<|channel|>commentary json",
    "FunctionGemma": "<start_function_call>call:{{ name }}{",
    "Gemma 4": "<|tool_call>call:{{ name }}{ <tool_call|>",
}


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
