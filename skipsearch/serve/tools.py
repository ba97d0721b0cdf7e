"""Tools that a chat may use: which of OpenAI's fields reach the chat template, and which are
rejected by name.

The chat template renders the tools into the prompt, in the form that the model was trained on. The
server does not constrain an answer to the form of a call, and it does not parse calls from the
text: the answer is the text that the model generates.
"""

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
    """Return the tools for the chat template; none if the client chose `none`.

    choice: `tool_choice`.
    `strict` asks the server to constrain calls, which this server does not do. Agents set it by
    default, so it is accepted, and removed from the prompt.

    Raises: APIError 400 for an invalid tool, and for a choice that needs a constrained answer.
    """
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
    """Return the tool without its field `strict`."""
    return tool | {
        "function": {name: value for name, value in tool["function"].items() if name != "strict"}
    }


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

    OpenAI's arguments are JSON text; a template takes an object.

    Raises: APIError 400.
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
    """Return the arguments of a call as an object. Raises: APIError 400."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise APIError(
            400, "a message has a tool call whose arguments are no JSON object", "messages"
        )
    return parsed


def render_prompt_ids(tokenizer: Any, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[int]:
    """Render a conversation and its tools with the chat template. Returns token ids.

    Raises: ModelError; APIError 400 if the template ignores tools or calls, so that the prompt is
        the same without them.
    """
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
    """Return the token ids of a conversation, tools included; None if the template fails."""
    try:
        return encode_chat(tokenizer, turns, tools)
    except ModelError:
        return None
