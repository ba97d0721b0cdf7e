"""Anthropic's Messages API, with the package `anthropic` as the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient
from helpers.served import served
from helpers.threads import one_thread

from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys

from .test_structured import make_service

if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message

anthropic = pytest.importorskip("anthropic")
__all__ = ["one_thread"]
USER: dict[str, Any] = {"role": "user", "content": "describe the module"}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 12}
TOOL: dict[str, Any] = {
    "name": "open_file",
    "description": "open a file",
    "input_schema": {
        "type": "object",
        "properties": {"mode": {"enum": ["read", "write"]}},
        "required": ["mode"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS = [TOOL, {"name": "stop", "input_schema": {"type": "object"}}]
FORCED = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "open_file"}, "max_tokens": 60}


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    with served(make_service()) as address:
        address = address.removesuffix("/v1")
        yield anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def fill(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a greedy request. Newer clients have none for the temperature."""
    return ASKED | fields | {"extra_body": {"temperature": 0} | fields.get("extra_body", {})}


def ask(client: Anthropic, **fields: Any) -> Message:
    """Return a message that its type accepts."""
    message = client.messages.create(**fill(fields))
    return anthropic.types.Message.model_validate(message.to_dict())


def stream(client: Anthropic, **fields: Any) -> tuple[list[Any], Message]:
    """Return (the raw events, each accepted by its type; the message that they make)."""
    events = list(client.messages.create(**fill(fields), stream=True))
    for event in events:
        type(event).model_validate(event.to_dict())
    with client.messages.stream(**fill(fields)) as streamed:
        return events, streamed.get_final_message()


def kinds(events: list[Any]) -> list[str]:
    """Return the types of events, those that repeat once."""
    return [e.type for i, e in enumerate(events) if i == 0 or events[i - 1].type != e.type]


def post_chat(client: Anthropic, messages: Any, path: str = "/v1/chat/completions") -> Any:
    asked = {"messages": messages, "max_tokens": 12, "temperature": 0}
    return client.post(path, body=asked, cast_to=object)


def test_a_text_is_that_of_a_chat_completion(client: Anthropic) -> None:
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    chat = post_chat(client, [{"role": "system", "content": "be brief"}, USER])
    for instructions in ("be brief", system):
        message = ask(client, system=instructions, metadata={"user_id": "me"})
        (block,) = message.content
        assert block.text == chat["choices"][0]["message"]["content"]
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 12)
        read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert read == chat["usage"]["prompt_tokens"]


def test_the_events_of_a_text(client: Anthropic) -> None:
    events, message = stream(client)
    # The client leaves out `ping`.
    assert [kind for kind in kinds(events) if kind != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    whole = ask(client)
    assert message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 12


def test_the_stop_sequence_that_ends_an_answer_is_named(client: Anthropic) -> None:
    text = ask(client).content[0].text
    stop = text[4:6]
    sequences = ["never so", stop]
    message = ask(client, stop_sequences=sequences)
    assert message.content[0].text == text[: text.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert stream(client, stop_sequences=sequences)[1].stop_sequence == stop


def test_a_forced_call_and_its_result(client: Anthropic) -> None:
    message = ask(client, **FORCED)
    (call,) = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "open_file")
    assert call.input["mode"] in ("read", "write")

    events, streamed = stream(client, **FORCED)
    assert streamed.content[0].input == call.input
    assert streamed.stop_reason == "tool_use"
    pieces = [e.delta.partial_json for e in events if e.type == "content_block_delta"]
    assert json.loads("".join(pieces)) == call.input

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "an empty file"}
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "which file?", "signature": ""},
                *[block.to_dict() for block in message.content],
            ],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    chat_call = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.input)},
    }
    chat_turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [chat_call]},
        {"role": "tool", "tool_call_id": call.id, "content": "an empty file"},
        {"role": "user", "content": "go on"},
    ]
    chat = post_chat(client, chat_turns)
    assert ask(client, messages=turns).content[0].text == chat["choices"][0]["message"]["content"]


def test_a_last_message_of_the_assistant_is_continued(client: Anthropic) -> None:
    turns = [USER, {"role": "assistant", "content": "It"}]
    chat = post_chat(client, turns)
    assert ask(client, messages=turns).content[0].text == chat["choices"][0]["message"]["content"]


def test_any_calls_a_tool_and_none_calls_no_tool(client: Anthropic) -> None:
    any_tool = {"type": "any", "disable_parallel_tool_use": True}
    message = ask(client, tools=TOOLS, tool_choice=any_tool, max_tokens=60)
    assert [block.type for block in message.content] == ["tool_use"]
    assert ask(client, tools=TOOLS, tool_choice={"type": "none"}).content == ask(client).content


def test_the_tokens_of_a_prompt_are_counted(client: Anthropic) -> None:
    for fields in ({}, {"tools": TOOLS}):
        counted = client.messages.count_tokens(model="tiny", messages=[USER], **fields)
        usage = ask(client, max_tokens=1, **fields).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"extra_body": {"max_tokens": None}}, "the request lacks max_tokens"),
        ({"max_tokens": 0}, "max_tokens is not as it should be"),
        ({"messages": []}, "messages is not as it should be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 'type "image"'),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 'type "document"'),
        ({"messages": [3]}, "a message is 3"),
        ({"stop_sequences": 3}, "stop_sequences is not"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 'type "bash_20250124"'),
        ({"tool_choice": {"type": "some"}}, 'type "some"'),
        ({"tool_choice": {"type": "any"}}, "tool_choice is"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers is set"),
        ({"extra_body": {"colour": 1}}, "colour is no field"),
        ({"extra_body": {"thinking": {"type": "enabled", "depth": 1}}}, "thinking.depth is no"),
        ({"extra_body": {"thinking": {"type": "deep"}}}, 'thinking has the type "deep"'),
        ({"extra_body": {"output_config": {"colour": 1}}}, "output_config.colour is no field"),
        (
            {"extra_body": {"tool_choice": {"type": "auto", "colour": 1}}},
            "tool_choice.colour is no field",
        ),
        ({"extra_body": {"response_format": {}}}, "response_format is no field"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_what_it_does_not_carry_out_is_refused_by_name(
    client: Anthropic, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, **fields)
    error = refused.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert sentence in error["error"]["message"]


def test_another_model_and_a_wrong_address_are_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server has 'tiny'"):
        ask(client, model="other")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()


def test_a_key_comes_in_either_header() -> None:
    service = make_service()
    service.keys = APIKeys(["k"])
    with TestClient(build_app(service)) as client:
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
            answer = client.post("/v1/messages/count_tokens", json=ASKED, headers=headers)
            assert answer.status_code == 200, answer.text
        for headers in ({}, {"x-api-key": "other"}):
            answer = client.post("/v1/messages", json=ASKED, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
