"""The forms in which models write calls of tools: how to ask for them, how to read them.

A chat template shows which form its model was trained on. If a template has no place for
tools, a system message lists them, in the form of Hermes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipsearch.core.constraint import JSON_STYLE, Constraint

Tool = Mapping[str, Any]  # as in OpenAI's field `tools`
Turn = dict[str, Any]
MAX_CALLS = 16  # of one answer that must call tools; a small model may not find an end
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class ToolFormat:
    """One form of calls.

    begin, end: text before and after a call. marker: a text in the chat templates of its models.
    starts: beginnings of a call in an answer, of which special tokens are no part; `at_start`: only
    at the start of the answer. arguments_key: the key of a call's arguments. list_of_calls: all
    calls are one JSON list.
    """

    name: str
    marker: str
    begin: str
    end: str
    starts: tuple[str, ...]
    at_start: bool = False
    arguments_key: str = "arguments"
    list_of_calls: bool = False

    def write_call(self, name: str, arguments: Any) -> str:
        """Return a call as the model writes it."""
        call = {"name": name, self.arguments_key: arguments}
        return f"{self.begin}{json.dumps(call, ensure_ascii=False)}{self.end}"

    def find_marks(self, tokenizer: Any) -> dict[str, int]:
        """Return the marks of the form that are tokens of their own, such as `<tool_call>`."""
        texts = (self.begin, self.end, *self.starts)
        return {
            token.content: i
            for i, token in tokenizer.added_tokens_decoder.items()
            if any(token.content in text for text in texts)
        }


HERMES = ToolFormat(
    "Hermes and Qwen", "<tool_call>", "<tool_call>\n", "\n</tool_call>", ("<tool_call>",)
)
MISTRAL = ToolFormat(
    "Mistral", "[TOOL_CALLS]", "", "", ("[TOOL_CALLS]", "[{"), at_start=True, list_of_calls=True
)
LLAMA_3 = ToolFormat(
    "Llama 3",
    '"parameters"',
    "",
    "",
    ("<|python_tag|>", "{"),
    at_start=True,
    arguments_key="parameters",
)
TOOL_FORMATS = (HERMES, MISTRAL, LLAMA_3)
# Marks of forms that cannot be read yet. Their templates also have a mark of the table.
UNKNOWN_FORMS = {
    "[ARGS]": "Mistral's newer form",  # the arguments follow the bare name
    "<function=": "Qwen3-Coder's XML",
    "<arg_key>": "GLM's XML",
}


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the form of calls that a chat template names; None if it names none of the table."""
    if any(mark in template for mark in UNKNOWN_FORMS):
        return None
    return next((form for form in TOOL_FORMATS if form.marker in template), None)


def call_constraint(
    tools: Sequence[Tool],
    form: ToolFormat,
    marks: Mapping[str, int],
    *,
    several: bool = True,
    text_before: bool = False,
    answer_schema: Mapping[str, Any] | None = None,
) -> Constraint:
    """Return the constraint of an answer that calls tools.

    The arguments of a tool have the schema of its `parameters`. marks: texts of the form that are
    tokens of their own, and their ids. several: there may be more than one
    call. text_before: there may also be other text, and no call. answer_schema: instead of calls,
    the answer may be JSON of this schema.
    """
    rules, names = list[str](), list[str]()
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps({"name": function["name"], form.arguments_key: 0}, ensure_ascii=False)
        rules.append(
            f"f{i}: {_quote(head.removesuffix('0}'))} a{i} {_quote('}')}\n"
            f"a{i}: {_json_rule(function.get('parameters') or ANY_OBJECT)}"
        )
        names.append(f"f{i}")
    call = f"({' | '.join(names)})"
    begin, end = _quote(form.begin, marks), _quote(form.end, marks)
    if text_before:
        trigger = form.starts[0]
        after = _quote(form.begin[len(trigger) :], marks)
        if trigger in marks:
            trigger = f"TEXT {_quote(trigger, marks)}"
        else:
            rules.append(f"trigger[lazy]: TEXT {_quote(trigger)}")
            trigger = "trigger"
        start = f"({trigger} {after} {call} {end})* TEXT"
        rules.append("TEXT: /(.|\\n)*/")
    elif form.list_of_calls:
        more = f'(", " {call}){{0,{MAX_CALLS - 1}}}' if several else ""
        start = f'"[" {call} {more} "]"'
    else:
        one = f"{begin} {call} {end}"
        separator = _quote("\n" if form.begin else "; ")
        start = f"{one} ({separator} {one}){{0,{MAX_CALLS - 1}}}" if several else one
    if answer_schema is not None:
        start = f"{start} | answer"
        rules.append(f"answer: {_json_rule(answer_schema)}")
    return Constraint(grammar="\n".join(["%llguidance {}", f"start: {start}", *rules]))


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


def _quote(text: str, marks: Mapping[str, int] | None = None) -> str:
    """Return a text as a grammar names it: marks by their ids, the rest in quotes."""
    if not marks:
        return json.dumps(text, ensure_ascii=False) if text else ""
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return " ".join(f"<[{marks[part]}]>" if part in marks else _quote(part) for part in parts)


def describe_tools(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Turn]:
    """Return a conversation for a template that has no place for tools.

    The tools are listed in the system message, calls are part of the assistant's text, and results
    are turns of the user.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = HERMES.write_call("name of the tool", {"name of the parameter": "value"})
    instructions = (
        f"You can call these tools:\n{listed}\n\nTo call one, answer with its name and arguments "
        f"in this form and nothing else:\n{example}"
    )
    described = list[Turn]()
    for turn in turns:
        content = turn.get("content") or ""
        if turn["role"] == "tool":
            described.append(
                {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
            )
        elif turn.get("tool_calls"):
            calls = [
                HERMES.write_call(call["function"].get("name", ""), call["function"]["arguments"])
                for call in turn["tool_calls"]
            ]
            described.append(
                {"role": turn["role"], "content": "\n".join(filter(None, [content, *calls]))}
            )
        else:
            described.append(turn)
    if not tools:
        return described
    if described and described[0]["role"] in ("system", "developer"):
        first = described[0]
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *described[1:]]
    return [{"role": "system", "content": instructions}, *described]
