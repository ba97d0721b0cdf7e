"""Tools that a chat may use: what of OpenAI's fields reaches the chat template, and what is refused
by name.

The template writes the tools into the prompt, in the words that the model was trained with. Nothing
forces an answer into the shape of a call, and none is read out of its text: the answer is the text
that the model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from skipsearch.errors import ModelError
from skipsearch.models.chat.chat_text import encode_chat
from skipsearch.serve.api_errors import APIError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

Turn = dict[str, Any]
Tool = dict[str, Any]


def read_tools(tools: Sequence[Any], choice: Any, parallel: bool | None) -> list[Tool]:
    """Read the tools that the chat template gets; none if the client chose `none`. choice:
    `tool_choice`.

    `strict` asks the server to constrain calls, which this one does not do yet. Agents send it by
    default, so it is accepted and left out of the prompt, which says nothing that is not so.

    Raises: Fault 400 for what is no tool, and for a choice that the answer would have to be forced
    into."""
    if len(tools) > MAX_TOOLS:
        raise APIError(400, f"{len(tools)} tools are given; at most {MAX_TOOLS} are read", "tools")
    for tool in tools:
        _check_tool(tool)
    if choice not in (None, "auto", "none"):
        raise APIError(
            400,
            f'tool_choice is {json.dumps(choice)[:60]}; this server forces no call: take "auto" or '
            '"none"',
            "tool_choice",
        )
    if tools and parallel is False:
        raise APIError(
            400,
            "parallel_tool_calls is false; this server does not limit how many calls a model "
            "writes: leave it out",
            "parallel_tool_calls",
        )
    return [] if choice == "none" else [_without_strict(tool) for tool in tools]


def _without_strict(tool: Tool) -> Tool:
    return tool | {
        "function": {name: value for name, value in tool["function"].items() if name != "strict"}
    }


def _check_tool(tool: Any) -> None:
    """Raises: Fault 400."""
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
    """`tool_calls` of an earlier turn as chat templates expect them: arguments as an object, where
    OpenAI has their JSON as text.

    Raises: Fault 400.
    """
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise APIError(
            400, 'tool_calls is not a list of {"type": "function", "function": {…}}', "messages"
        )
    return [
        call
        | {
            "function": call["function"]
            | {"arguments": _parse_arguments(call["function"].get("arguments"))}
        }
        for call in calls
    ]


def _parse_arguments(arguments: Any) -> dict[str, Any]:
    try:
        found = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise APIError(
            400, "a message has a tool call whose arguments are no JSON object", "messages"
        )
    return found


def render_prompt_ids(tokenizer: Any, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[int]:
    """Token ids of a conversation and the tools it may use, in the chat template.

    Raises: ModelError; Fault 400 where the template leaves out tools or calls, so that the prompt
    is the same without them."""
    ids = encode_chat(tokenizer, turns, tools or None)
    if tools and ids == _render_ids(tokenizer, turns, []):
        raise APIError(
            400,
            "this model's chat template has no place for tools, so the model would not see them: "
            "leave tools out",
            "tools",
            "no_tools_in_template",
        )
    if any("tool_calls" in turn for turn in turns):
        without = [
            {name: value for name, value in turn.items() if name != "tool_calls"} for turn in turns
        ]
        if ids == _render_ids(tokenizer, without, tools or None):
            raise APIError(
                400,
                "a message has 'tool_calls', for which this model's chat template has no place: "
                "write them into its content",
                "messages",
                "no_tools_in_template",
            )
    return ids


def _render_ids(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None
) -> list[int] | None:
    """None where the template cannot do without."""
    try:
        return encode_chat(tokenizer, turns, tools)
    except ModelError:
        return None
