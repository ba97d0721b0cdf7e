"""A value of a wrong type, at any depth of a request, is read or refused, and is no error 500."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from skipsearch.serve.answer_parts import read_options
from skipsearch.serve.anthropic_messages import MESSAGES
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.openai_responses import RESPONSES
from skipsearch.serve.protocol import ChatCompletionRequest, parse_request

ODD: tuple[Any, ...] = (None, True, 0, -1, 2.5, "", "x", [], {}, [[]], [{}], {"a": 1}, [None])
USER = {"role": "user", "content": "x"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object"}
CHAT = {
    "messages": [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": ""},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "stream_options": {"include_usage": True},
    "speculative": {"n_max": 3},
    "logit_bias": {"5": 1},
}
INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
]
RESPONSE = {
    "input": INPUT,
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {
        "format": {"type": "json_schema", "name": "s", "schema": SCHEMA},
        "verbosity": "medium",
    },
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
}
BLOCKS = [
    {"type": "thinking", "thinking": "x"},
    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
]
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}
MESSAGE = {
    "max_tokens": 4,
    "system": [{"type": "text", "text": "x"}],
    "messages": [
        USER,
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}
APIS: dict[str, tuple[dict[str, Any], Callable[[bytes], ChatCompletionRequest]]] = {
    "chat": (CHAT, lambda body: parse_request(ChatCompletionRequest, body)),
    "responses": (RESPONSE, lambda body: RESPONSES.read_request(body)[0]),
    "messages": (MESSAGE, lambda body: MESSAGES.read_request(body)[0]),
}


def replacements(value: Any) -> list[Any]:
    """Return copies of a JSON value, each with one odd value in one place."""
    copies = list(ODD)
    if isinstance(value, dict):
        for key, inner in value.items():
            copies += [value | {key: other} for other in replacements(inner)]
    if isinstance(value, list):
        for i, inner in enumerate(value):
            copies += [[*value[:i], other, *value[i + 1 :]] for other in replacements(inner)]
    return copies


def read_all(request: ChatCompletionRequest) -> None:
    """Read what the server reads of a request before the prompt is rendered."""
    _ = request.turns, request.tool_use, request.constraint, request.template_variables


@pytest.mark.parametrize("api", APIS)
def test_one_odd_value_anywhere_is_read_or_refused(api: str) -> None:
    asked, read = APIS[api]
    read_all(read(json.dumps(asked).encode()))
    for wrong in replacements(asked):
        with suppress(APIError):
            read_all(read(json.dumps(wrong).encode()))


@pytest.mark.parametrize("name", [[], {}, 5, None])
def test_a_call_without_a_name_is_refused(name: Any) -> None:
    call = CALL | {"function": {"name": name, "arguments": "{}"}}
    asked = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(APIError, match="tool_calls"):
        read_all(parse_request(ChatCompletionRequest, json.dumps(asked).encode()))


@pytest.mark.parametrize("value", ["", 0, False, []])
def test_an_object_that_is_no_object_is_not_taken_as_left_out(value: Any) -> None:
    assert read_options({"thinking": None}, "thinking", ("type",)) == {}
    with pytest.raises(APIError, match="thinking"):
        read_options({"thinking": value}, "thinking", ("type",))
