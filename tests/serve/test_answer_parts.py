"""Thinking and calls in the events of other APIs, and in the conversations that they send back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from skipsearch.serve.answer_parts import AnswerWriter
from skipsearch.serve.anthropic_messages import MESSAGES
from skipsearch.serve.openai_responses import RESPONSES
from skipsearch.serve.protocol import ChatCompletionRequest
from skipsearch.serve.responses import Choice, ChoiceDelta

USER: dict[str, Any] = {"role": "user", "content": "x"}


def write(api: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return (the events, the full response) of an answer: a thought, a text and a call."""
    choice = Choice(0, None, [], n_tokens=9, n_reasoning=4)
    request = ChatCompletionRequest.model_validate({"messages": [USER]})
    service = SimpleNamespace(name="m", tokenizer=None)
    active = SimpleNamespace(request=request, service=service, choices=[choice], prompt_tokens=3)
    writer: AnswerWriter = api.make_writer(active, {})
    call = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    events = writer.begin()
    events += writer.add(ChoiceDelta(choice, "", (), reasoning="hm"))
    events += writer.add(ChoiceDelta(choice, "yes", (), reasoning=" so"))
    events += writer.add(ChoiceDelta(choice, "", (), tool_calls=[call]))
    choice.finish_reason = "tool_calls"
    events += writer.add(ChoiceDelta(choice, "", (), tool_calls=[more]))
    events += writer.end()
    lines = [line for line in events.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines], writer.full_response()


def test_a_response_has_an_item_for_each_part() -> None:
    events, response = write(RESPONSES)
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    checked = Response.model_validate(response)
    assert [item.type for item in checked.output] == ["reasoning", "message", "function_call"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm so"}]
    assert response["output"][2]["arguments"] == '{"a": 1}'
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    assert "response.reasoning_text.done" in [event["type"] for event in events]
    assert events[-1]["response"]["output"] == response["output"]


def test_a_message_has_a_block_for_each_part() -> None:
    events, message = write(MESSAGES)
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm so", "signature": ""},
        {"type": "text", "text": "yes"},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
    ]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas[1:]] == [
        "thinking_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
    ]
    types = pytest.importorskip("anthropic.types")
    for event in events:
        if event["type"] != "ping":
            TypeAdapter(types.RawMessageStreamEvent).validate_python(event)
    types.Message.model_validate(message)


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES])
def test_an_answer_that_is_sent_back_is_one_message(api: Any) -> None:
    response = write(api)[1]
    if api is RESPONSES:
        output = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
        body = {"input": [USER, *response["output"], output]}
    else:
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "2"}
        answer = {"role": "assistant", "content": response["content"]}
        body = {"max_tokens": 1, "messages": [USER, answer, {"role": "user", "content": [result]}]}
    turns = api.read_request(json.dumps(body).encode())[0].turns
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
    assert (turns[1]["content"], turns[1]["reasoning_content"]) == ("yes", "hm so")
    assert turns[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert turns[2]["content"] == "2"


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {}),
    ],
)
def test_thinking_is_a_variable_of_the_chat_template(
    thinking: dict[str, Any], variables: dict[str, Any]
) -> None:
    body = {"max_tokens": 1, "messages": [USER], "thinking": thinking}
    request = MESSAGES.read_request(json.dumps(body).encode())[0]
    assert request.template_variables == variables
