"""Tools for chat templates that have no place for tools: a system message, in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from skipsearch.models.chat.formats import HERMES
from skipsearch.models.chat.tool_formats import Tool

Turn = dict[str, Any]


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
