"""OpenAI's Responses API, with the package `openai` as the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.served import served
from helpers.threads import one_thread
from openai import OpenAI
from openai.types.responses import Response

from .test_structured import SCHEMA, make_service

__all__ = ["one_thread"]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "input": "describe the module",
    "max_output_tokens": 12,
    "temperature": 0,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "open_file",
    "description": "open a file",
    "parameters": {
        "type": "object",
        "properties": {"mode": {"enum": ["read", "write"]}},
        "required": ["mode"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS = [TOOL, {"type": "function", "name": "stop"}]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with served(make_service()) as address:
        yield OpenAI(base_url=address, api_key="none", max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Response:
    """Return a response that its type accepts."""
    response = client.responses.create(**ASKED | fields)
    return Response.model_validate(response.to_dict())


def stream(client: OpenAI, **fields: Any) -> list[Any]:
    """Return the events of a stream, each accepted by its type and numbered."""
    events = list(client.responses.create(**ASKED | fields, stream=True))
    for number, event in enumerate(events):
        assert type(event).model_validate(event.to_dict()).sequence_number == number
    return events


def kinds(events: list[Any]) -> list[str]:
    """Return the types of events, those that repeat once."""
    names = [event.type.removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def chat_text(client: OpenAI, messages: Any) -> str | None:
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    return answer.choices[0].message.content


def test_a_text_is_that_of_a_chat_completion(client: OpenAI) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "describe the module"},
    ]
    response = ask(client, instructions="be brief", store=True, metadata={"a": "b"}, user="me")
    assert response.output_text == chat_text(client, messages)
    assert (response.status, response.instructions) == ("incomplete", "be brief")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 12


def test_input_is_a_text_or_items(client: OpenAI) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three four"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "three "},
                {"type": "input_text", "text": "four"},
            ],
        },
    ]
    assert ask(client, input=items).output_text == chat_text(client, messages)


def test_the_events_of_a_text(client: OpenAI) -> None:
    events = stream(client)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == ask(client).output_text


def test_a_forced_call_and_its_result(client: OpenAI) -> None:
    forced = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "open_file"},
        "max_output_tokens": 60,
    }
    response = ask(client, **forced)
    (call,) = response.output
    assert call.type == "function_call"
    assert (response.status, call.name, call.status) == ("completed", "open_file", "completed")
    assert json.loads(call.arguments)["mode"] in ("read", "write")

    events = stream(client, **forced)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments == events[-1].response.output[0].arguments

    items = [
        {"role": "user", "content": "describe the module"},
        *[item.to_dict() for item in response.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "an empty file"},
    ]
    chat_call = {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    messages = [
        {"role": "user", "content": "describe the module"},
        {"role": "assistant", "content": None, "tool_calls": [chat_call]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "an empty file"},
    ]
    assert ask(client, input=items).output_text == chat_text(client, messages)


def test_several_calls_are_items_of_their_own(client: OpenAI) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 200}
    events = stream(client, **asked, parallel_tool_calls=True)
    added = [e for e in events if e.type == "response.output_item.added"]
    done = [e for e in events if e.type == "response.output_item.done"]
    assert len(added) > 1
    assert [e.output_index for e in added] == [e.output_index for e in done] == [*range(len(added))]
    output = events[-1].response.output
    assert [item.id for item in output] == [e.item.id for e in added]
    assert len({item.call_id for item in output}) == len(output)


def test_an_answer_has_the_schema_of_text_format(client: OpenAI) -> None:
    form = {"type": "json_schema", "name": "part", "schema": SCHEMA, "strict": True}
    response = ask(client, text={"format": form}, max_output_tokens=100)
    assert json.loads(response.output_text).keys() == SCHEMA["properties"].keys()
    assert response.status == "completed"
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        pytest.param({"input": openai.omit}, "input", "the request lacks input", id="no input"),
        ({"input": []}, "input", "input is not as it should be"),
        ({"input": 3}, "input", "input is 3"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "c"}, "conversation", "stores no responses"),
        ({"background": True}, "background", "at once"),
        ({"truncation": "auto"}, "truncation", 'truncation is "auto"'),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is not"),
        ({"temperature": -1}, "temperature", "temperature is not"),
        ({"tools": [{"type": "web_search"}]}, "tools", 'type "web_search"'),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", 'type "file_search"'),
        ({"text": {"format": {"type": "xml"}}}, "text", "text is"),
        ({"extra_body": {"messages": []}}, "messages", "messages is no field"),
        ({"extra_body": {"colour": 1}}, "colour", "colour is no field"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", 'type "item_reference"'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            'type "input_image"',
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x"}]},
            "input",
            "a function_call_output has null as its content",
        ),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_what_it_does_not_carry_out_is_refused_by_name(
    client: OpenAI, fields: dict[str, Any], param: str, sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert sentence in str(refused.value)
    assert refused.value.param == param


def test_no_response_is_stored(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.retrieve("resp_1")
