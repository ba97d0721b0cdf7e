"""Tools that a chat may use: the fields of OpenAI's protocol, and the prompt that shows the tools.

The chat template renders the tools into the prompt, in the form that the model was trained on. If
it has no place for them, a system message lists them. The model's calls are read out of its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skipsearch.core.constraint import Constraint
from skipsearch.errors import ModelError
from skipsearch.models.chat.call_reader import has_own_reader
from skipsearch.models.chat.chat_text import encode_chat, get_chat_template
from skipsearch.models.chat.described_tools import describe_tools
from skipsearch.models.chat.formats import HERMES, TOOL_FORMATS, UNKNOWN_FORMS, detect_tool_format
from skipsearch.models.chat.tool_formats import ANY_OBJECT, ToolFormat, call_constraint
from skipsearch.serve.api_errors import APIError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

Turn = dict[str, Any]
Tool = dict[str, Any]
Encode = Callable[..., list[int]]  # `encode_chat` of one tokenizer


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    required: whether the answer must be calls. only: the one tool that may be called; None: any.
    parallel: whether there may be several calls.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def called_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return tuple(tool for tool in self.tools if self.only in (None, tool["function"]["name"]))

    @property
    def in_prompt(self) -> list[Tool]:
        """The tools as chat templates take them."""
        return [_in_prompt(tool) for tool in self.tools]

    def constrain(
        self, form: ToolFormat, marks: Mapping[str, int], answer_schema: Any, relaxed: bool
    ) -> Constraint | None:
        """Return the constraint of the answer; None if its form is free.

        marks: as for `call_constraint`. answer_schema: the schema that `response_format` names.
        relaxed: the arguments of a tool that is not strict may be any object.
        """
        tools = [
            tool
            if tool["function"].get("strict") or not relaxed
            else {"function": tool["function"] | {"parameters": ANY_OBJECT}}
            for tool in self.called_tools
        ]
        if self.required:
            return call_constraint(tools, form, marks, several=self.parallel and self.only is None)
        if answer_schema is not None:
            return call_constraint(
                tools, form, marks, several=self.parallel, answer_schema=answer_schema
            )
        is_strict = any(tool["function"].get("strict") for tool in self.tools)
        if is_strict and form.trigger:  # without a mark nothing tells where a call begins
            return call_constraint(tools, form, marks, text_before=True)
        return None


def read_tools(tools: Sequence[Any], choice: Any, parallel: bool | None) -> ToolUse | None:
    """Return the tools of a request; None if there are none, or the client chose `none`.

    choice: `tool_choice`. Raises: APIError 400 for an invalid tool or choice.
    """
    if len(tools) > MAX_TOOLS:
        raise APIError(400, f"{len(tools)} tools are given; at most {MAX_TOOLS} are read", "tools")
    for tool in tools:
        _check_tool(tool)
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise APIError(400, f"two tools have the name {twice}: rename one", "tools")
    use = ToolUse(tuple(tools), parallel=parallel is not False)
    if choice in (None, "auto", "none"):
        return None if choice == "none" or not tools else use
    # A model that has to call may not find an end, so it makes several calls only if asked to.
    use = replace(use, required=True, parallel=parallel is True)
    if choice == "required" and names:
        return use
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name in names:
            return replace(use, only=name)
    raise APIError(
        400,
        f'tool_choice is {json.dumps(choice)[:80]}; it is "auto", "none", or, with tools, '
        '"required" or {"type": "function", "function": {"name": one of tools}}',
        "tool_choice",
    )


def _in_prompt(tool: Tool) -> Tool:
    """Return the tool without the fields that are for the server alone."""
    function = {k: v for k, v in tool["function"].items() if k not in ("strict", "cache_control")}
    return {k: v for k, v in tool.items() if k != "cache_control"} | {"function": function}


def _check_tool(tool: Any) -> None:
    """Raise APIError 400 for an invalid tool."""
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise APIError(
            400,
            'a tool is not {"type": "function", "function": {…}}, the one kind that this server '
            "knows",
            "tools",
        )
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise APIError(
            400,
            f"a tool has the name {json.dumps(name)[:80]}; give it 1 to 64 letters, digits and "
            "_.:-",
            "tools",
        )
    if not isinstance(function.get("description"), str | None) or not isinstance(
        function.get("parameters"), dict | None
    ):
        raise APIError(
            400,
            f"the tool {name} has a description that is no text, or parameters that are no object",
            "tools",
        )
    if not isinstance(function.get("strict"), bool | None):
        raise APIError(
            400,
            f"the tool {name} has a strict that is neither true, false nor null: leave it out",
            "tools",
        )


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """Return the `tool_calls` of an earlier message as chat templates take them.

    OpenAI's arguments are JSON text; a template takes an object. Text that is no object stays text.

    Raises: APIError 400.
    """
    if not isinstance(calls, list) or not all(
        isinstance(call, dict)
        and isinstance(call.get("id"), str | None)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    ):
        raise APIError(
            400,
            'tool_calls is not a list of {"id": "…", "type": "function", "function": {"name": '
            '"…", "arguments": "…"}}',
            "messages",
        )
    return [
        call
        | {
            "function": call["function"]
            | {"arguments": _parse_arguments(call["function"].get("arguments"))}
        }
        for call in calls
    ]


def _parse_arguments(arguments: Any) -> dict[str, Any] | str:
    """Return the arguments of a call as an object; as text if they are none, as models also write
    them.
    """
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _wrap_text_arguments(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with an object around arguments that are text: some templates need one."""
    wrapped = json.loads(json.dumps(turns))
    for call in (call for turn in wrapped for call in turn.get("tool_calls", ())):
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = {"arguments": call["function"]["arguments"]}
    return list(wrapped)


def render_prompt_ids(
    tokenizer: Any,
    turns: Sequence[Turn],
    tools: Sequence[Tool],
    variables: Mapping[str, Any] | None = None,
) -> tuple[list[int], ToolFormat]:
    """Render a conversation and its tools. Returns (token ids, the form of the model's calls).

    variables: others that the template may read.

    If the template has no place for tools or for earlier calls, a system message lists the tools,
    and calls are part of the text.

    Raises: ModelError; APIError 400 if the template has tools in a form that cannot be read.
    """
    encode = partial(encode_chat, tokenizer, variables=variables)
    with_tools = bool(tools) or any(
        turn["role"] == "tool" or "tool_calls" in turn for turn in turns
    )
    if not with_tools:
        return encode(turns), detect_tool_format(get_chat_template(tokenizer) or "") or HERMES
    has_text = any(
        isinstance(call["function"]["arguments"], str)
        for turn in turns
        for call in turn.get("tool_calls", ())
    )
    if has_text and _render_ids(encode, turns, tools or None) is None:
        turns = _wrap_text_arguments(turns)
    if not _has_place_for_tools(tokenizer, encode, turns, tools):
        return encode(describe_tools(turns, tools)), HERMES
    template = get_chat_template(tokenizer, tools or None) or ""
    form = detect_tool_format(template)
    if tools and form is None and not has_own_reader(tokenizer):
        known = ", ".join(form.name for form in TOOL_FORMATS)
        unknown = [name for mark, name in UNKNOWN_FORMS.items() if mark in template]
        raise APIError(
            400,
            f"this model writes calls of tools in {', '.join(unknown) or 'a form'} "
            f"that this server cannot read (it reads {known}, and tokenizers with a "
            "response_template): leave tools out",
            "tools",
            "unknown_tool_format",
        )
    return encode(turns, tools or None), form or HERMES


def _has_place_for_tools(
    tokenizer: Any, encode: Encode, turns: Sequence[Turn], tools: Sequence[Tool]
) -> bool:
    """Return whether the prompt differs without the tools, and without the calls."""
    ids = _render_ids(encode, turns, tools or None)
    if ids is None:
        return detect_tool_format(get_chat_template(tokenizer, tools or None) or "") is not None
    if tools and ids == _render_ids(encode, turns, None):
        return False
    without = [
        {name: value for name, value in turn.items() if name != "tool_calls"} for turn in turns
    ]
    has_calls = any("tool_calls" in turn for turn in turns)
    return not has_calls or ids != _render_ids(encode, without, tools or None)


def _render_ids(
    encode: Encode, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None
) -> list[int] | None:
    """Return the token ids of a conversation, tools included; None if the template fails."""
    try:
        return encode(turns, tools)
    except ModelError:
        return None
