"""Conversations in rows: OpenAI's `messages` and ShareGPT's `conversations`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.rows import Row

CONVERSATION_COLUMNS = ("messages", "conversations")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
NEUTRAL_ROLES = ("system", "developer", "assistant")  # of turns that ask nothing
Turn = Mapping[str, Any]  # with `role` and `content`, as chat templates take it


def name_conversation(row: Row) -> str | None:
    """Return the name of a row's column with a conversation; None if it has a prompt or none."""
    if "prompt" in row.columns:
        return None
    return next((name for name in CONVERSATION_COLUMNS if name in row.columns), None)


def read_turns(row: Row) -> list[Turn]:
    """Return the request of a row's conversation: its turns before the last answer.

    Raises: TaskError.
    """
    turns = row.columns[name_conversation(row) or ""]
    read = [_read_turn(row, turn) for turn in turns] if isinstance(turns, list) else []
    while read and read[-1]["role"] == "assistant":
        read.pop()
    if all(turn["role"] in NEUTRAL_ROLES for turn in read):
        raise TaskError(
            f"{row.location}: its conversation has no turn of a user; a turn is "
            '{"role": "user", "content": "…"} or {"from": "human", "value": "…"}'
        )
    return read


def read_tools(row: Row) -> list[Any]:
    """Return the tools of a request, as OpenAI's `tools`; [] for none. Raises: TaskError."""
    tools = row.columns.get("tools")
    if isinstance(tools, str):  # data sets keep them as text
        try:
            tools = json.loads(tools or "[]")
        except (ValueError, RecursionError):
            tools = tools or None
    if tools is not None and not isinstance(tools, list):
        raise TaskError(
            f"{row.location}: tools is {str(tools)[:60]!r}; it is a list such as "
            '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]'
        )
    return tools or []


def to_plain_text(turns: Sequence[Turn]) -> str:
    """Return turns as the text that a model without a chat template gets."""
    if len(turns) == 1:
        return str(turns[0]["content"] or "")
    return "\n\n".join(f"{turn['role']}: {turn['content'] or ''}" for turn in turns)


def _read_turn(row: Row, turn: Any) -> Turn:
    """Return a turn as chat templates take it. Raises: TaskError."""
    fields = turn if isinstance(turn, dict) else {}
    role = fields.get("role", fields.get("from"))
    content = _join_parts(fields.get("content", fields.get("value")))
    calls = fields.get("tool_calls") or []
    if not isinstance(role, str) or not (isinstance(content, str) or (calls and content is None)):
        raise TaskError(
            f"{row.location}: a turn of its conversation is {str(turn)[:60]!r}; a turn is "
            '{"role": "user", "content": "…"} or {"from": "human", "value": "…"}, and its content '
            "is text"
        )
    others = {
        name: fields[name]
        for name in ("name", "tool_call_id", "reasoning_content")
        if isinstance(fields.get(name), str)
    }
    if calls:
        others["tool_calls"] = [_read_call(row, call) for call in calls]
    return {"role": SHAREGPT_ROLES.get(role, role), "content": content, **others}


def _join_parts(content: Any) -> Any:
    """Return the text of content in parts; anything else as it is."""
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return content
    return "".join(part["text"] for part in content)


def _read_call(row: Row, call: Any) -> Any:
    """Return a call of a tool with an object of arguments, which files have as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TaskError(
            f"{row.location}: a call of a tool is {str(call)[:60]!r}; it is "
            '{"type": "function", "function": {"name": "…", "arguments": "…"}}'
        )
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        read = arguments  # models also write what is no JSON
    return {**call, "function": {**function, "arguments": read}}
