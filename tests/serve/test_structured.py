"""Answers in a given shape over the server: JSON, grammars and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from helpers.embedded import embedded_model
from helpers.marked_tokenizer import add_marks
from helpers.served import served
from helpers.threads import one_thread
from openai import OpenAI
from pydantic import BaseModel

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.service import Service

from .tiny_server import LIMITS

__all__ = ["one_thread"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["module", "class", "function"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["title", "kind", "lines"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "open_file",
            "description": "open a file",
            "parameters": {
                "type": "object",
                "properties": {
                    "mode": {"enum": ["read", "write"]},
                    "line": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["mode", "line"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
USER: list[Any] = [{"role": "user", "content": "describe the module"}]


def make_service(marks: Sequence[str] = ()) -> Service:
    """marks: texts that are special tokens of the vocabulary."""
    model = embedded_model()
    model.tokenizer = add_marks(model.tokenizer, marks) if marks else copy(model.tokenizer)
    model.tokenizer.chat_template = TEMPLATE
    mask = SkipMask(model.spec.n_layers, (3, 5, 7), (4, 6))
    return Service(Decoder(model, mask, draft_length=4), APIKeys([]), LIMITS, "tiny")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(build_app(make_service())) as client:
        yield client


@pytest.fixture(scope="module")
def marked_client() -> Iterator[TestClient]:
    """A client of a model in whose vocabulary the marks of a call are special tokens."""
    with TestClient(build_app(make_service(["<tool_call>", "</tool_call>"]))) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client() -> Iterator[OpenAI]:
    """openai's own client of a server."""
    with served(make_service()) as address:
        yield OpenAI(base_url=address, api_key="none", max_retries=0)


def ask(client: TestClient, **more: Any) -> Any:
    return client.post(
        "/v1/chat/completions", json={"messages": USER, "max_tokens": 80, "temperature": 0} | more
    )


def read_stream(answer: Any) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_an_answer_has_the_schema_that_response_format_names(
    client: TestClient, temperature: float
) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
    answer = ask(client, response_format=named, temperature=temperature, seed=1).json()
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
    assert answer["choices"][0]["finish_reason"] == "stop"
    drafted = {by["kind"]: by for by in answer["skipsearch"]["by_drafter"]}
    assert drafted["forced"]["accepted"] > 0


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_followed_as_in_llama_cpp(
    client: TestClient, kind: str
) -> None:
    answer = ask(client, response_format={"type": kind, "schema": SCHEMA}).json()
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
    refused = ask(client, response_format={"type": kind, "schema": "part"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


def test_the_answer_does_not_depend_on_drafts(client: TestClient) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
    texts = [
        ask(client, response_format=named, skipsearch={"profile": profile}).json()
        for profile in ("own", "none")
    ]
    assert texts[0]["choices"][0]["message"] == texts[1]["choices"][0]["message"]
    assert texts[0]["skipsearch"]["accepted"] > texts[1]["skipsearch"]["accepted"] == 0


def test_a_completion_takes_a_regular_expression_and_a_grammar(client: TestClient) -> None:
    for shape, texts in (
        ({"type": "regex", "regex": "(red|green){2}"}, {"redred", "redgreen", "greenred"}),
        ({"type": "grammar", "grammar": 'start: "yes" | "no"'}, {"yes", "no"}),
    ):
        answer = client.post(
            "/v1/completions",
            json={"prompt": "x = ", "max_tokens": 9, "temperature": 0, "response_format": shape},
        )
        assert answer.json()["choices"][0]["text"] in {*texts, "greengreen"}


def test_log_probabilities_are_of_the_masked_distribution(client: TestClient) -> None:
    shape = {"type": "grammar", "grammar": 'start: "yes" | "no"'}
    answer = ask(client, response_format=shape, logprobs=True, top_logprobs=5).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    for entry in entries:
        legal = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        assert legal[entry["token"]] == entry["logprob"]
        assert sum(2.718281828459045**value for value in legal.values()) <= 1 + 1e-6
    assert entries[-1]["logprob"] == pytest.approx(0, abs=1e-6)  # only the end was legal


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fixture", ["client", "marked_client"])
def test_a_required_call_has_the_schema_of_its_tool(
    request: pytest.FixtureRequest, fixture: str, stream: bool
) -> None:
    client: TestClient = request.getfixturevalue(fixture)
    choice = {"type": "function", "function": {"name": "open_file"}}
    answer = ask(client, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        events = read_stream(answer)
        deltas = [
            call
            for event in events
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", [])
        ]
        name, reason = deltas[0]["function"]["name"], events[-1]["choices"][0]["finish_reason"]
        assert deltas[0]["id"].startswith("call_")
        assert all("id" not in delta for delta in deltas[1:])
        arguments = "".join(delta["function"]["arguments"] for delta in deltas)
        assert not any(
            choice["delta"].get("content") for event in events for choice in event["choices"]
        )
    else:
        found = answer.json()["choices"][0]
        (call,) = found["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        reason = found["finish_reason"]
        assert found["message"]["content"] is None
    assert (name, reason) == ("open_file", "tool_calls")
    jsonschema.validate(json.loads(arguments), TOOLS[0]["function"]["parameters"])


def test_required_lets_the_model_choose_the_tool(client: TestClient) -> None:
    found = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).json()
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in ("open_file", "stop")


@pytest.mark.parametrize("several", [None, False, True])
def test_a_required_answer_is_one_call_unless_several_are_asked_for(
    client: TestClient, several: bool | None
) -> None:
    """The end of the text is made unlikely, as it is in models that repeat calls."""
    end = make_service().model.spec.eos_token_ids[0]
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": several}
    found = ask(client, **asked, logit_bias={str(end): -100}).json()
    n_calls = len(found["choices"][0]["message"]["tool_calls"])
    assert (n_calls == 1) == (not several)
    assert (found["usage"]["completion_tokens"] == 80) == bool(several)


@pytest.mark.parametrize("fixture", ["client", "marked_client"])
def test_with_auto_the_answer_may_be_text(request: pytest.FixtureRequest, fixture: str) -> None:
    client: TestClient = request.getfixturevalue(fixture)
    for tools in (TOOLS, TOOLS[1:]):  # with a strict tool and without
        found = ask(client, tools=tools, max_tokens=24).json()["choices"][0]
        assert found["finish_reason"] in ("length", "stop")
        assert found["message"]["content"]


def test_json_or_a_call_if_both_are_asked_for(client: TestClient) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
    message = ask(client, tools=TOOLS, response_format=named).json()["choices"][0]["message"]
    if message.get("tool_calls"):
        assert message["content"] is None
    else:
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_tool_without_strict_may_have_a_schema_that_masks_cannot_follow(
    client: TestClient,
) -> None:
    loose = json.loads(json.dumps(TOOLS[0]))
    loose["function"]["parameters"]["not"] = {"type": "string"}
    refused = ask(client, tools=[loose], tool_choice="required")
    assert refused.status_code == 400
    assert "not" in refused.json()["error"]["message"]
    loose["function"]["strict"] = False
    answer = ask(client, tools=[loose], tool_choice="required", max_tokens=200)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"]


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "not"),
        ({"type": "regex", "regex": "("}, "regular expression"),
        ({"type": "grammar", "grammar": "start: nowhere"}, "nowhere"),
        ({"type": "regex"}, "its type is text"),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_followed_is_refused_by_name(
    client: TestClient, shape: dict[str, Any], named: str
) -> None:
    answer = ask(client, response_format=shape)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert named in answer.json()["error"]["message"]


class Part(BaseModel):
    title: str
    kind: str
    lines: int


def test_openais_own_parse_works_unmodified(openai_client: OpenAI) -> None:
    answer = openai_client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Part, temperature=0, max_tokens=400
    )
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert isinstance(parsed.lines, int)


def test_openais_stream_of_a_call_works_unmodified(openai_client: OpenAI) -> None:
    with openai_client.chat.completions.stream(
        model="tiny",
        messages=USER,
        tools=TOOLS[:1],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments).keys() == {"mode", "line"}


def test_an_agents_turn_with_a_result_is_answered(openai_client: OpenAI) -> None:
    first = openai_client.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "open_file"}},
        temperature=0,
    )
    message = first.choices[0].message
    assert message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls
    ]
    second = openai_client.chat.completions.create(
        model="tiny",
        messages=[*USER, message.model_dump(exclude_none=True), *results],  # type: ignore[list-item]
        tools=TOOLS,
        max_tokens=8,
    )
    assert second.choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_the_bytes_of_all_tokens_are_those_of_the_text_and_offsets_count_its_characters(
    client: TestClient, chat: bool, stream: bool
) -> None:
    """A character such as an emoji has several tokens, none of which has a text of its own."""
    text = "é🙂日b🙂"
    asked = {
        "max_tokens": 40,
        "temperature": 0,
        "response_format": {"type": "regex", "regex": text},
        "stream": stream,
    }
    if chat:
        answer = ask(client, logprobs=True, top_logprobs=2, **asked)
    else:
        asked |= {"prompt": "x = é", "logprobs": 2, "echo": True}
        answer = client.post("/v1/completions", json=asked)
    events = read_stream(answer) if stream else [answer.json()]
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    if chat:
        entries = [entry for part in parts if part for entry in part["content"]]
        spoken = [entry["bytes"] for entry in entries]
        assert b"".join(map(bytes, spoken)).decode() == text
        assert len(spoken) > len(text)
        assert entries[-1]["token"] == entries[-1]["top_logprobs"][0]["token"] == "<|endoftext|>"
        assert entries[-1]["bytes"] == entries[-1]["top_logprobs"][0]["bytes"] == []
        for entry in entries:
            top = {bytes(one["bytes"]): one["logprob"] for one in entry["top_logprobs"]}
            assert top[bytes(entry["bytes"])] == entry["logprob"]
    else:
        offsets = [offset for part in parts if part for offset in part["text_offset"]]
        tokens = [token for part in parts if part for token in part["tokens"]]
        sent = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert sent == "x = é" + text
        assert offsets == sorted(offsets)
        # The last is that of the end-of-sequence token.
        assert set(offsets) >= set(range(len("x = é"), len(sent) + 1))
        for offset, token in zip(offsets[:-1], tokens[:-1], strict=True):
            assert sent.startswith(token, offset) or token == "\N{REPLACEMENT CHARACTER}"
