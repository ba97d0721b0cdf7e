"""Answers that continue the last message of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from helpers.threads import one_thread

from skipsearch.models.chat.thinking import detect_thinking
from skipsearch.serve.app import build_app
from skipsearch.serve.service import Service

from .test_structured import SCHEMA, TOOLS, make_service

__all__ = ["one_thread"]
# Its messages have an end, and it trims them, as many do.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }} END\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER: dict[str, Any] = {"role": "user", "content": "describe the module"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "def main("}


@pytest.fixture(scope="module")
def service() -> Service:
    service = make_service()
    service.tokenizer.chat_template = TEMPLATE
    return service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(build_app(service)) as client:
        yield client


def ask(client: TestClient, *messages: Any, **more: Any) -> Any:
    asked = {"messages": messages, "max_tokens": 12, "temperature": 0} | more
    return client.post("/v1/chat/completions", json=asked)


def content(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def complete(client: TestClient, service: Service, prompt: str) -> str:
    """Return the answer to a prompt without a template."""
    ids = service.tokenizer(prompt, add_special_tokens=False).input_ids
    asked = {"prompt": ids, "max_tokens": 12, "temperature": 0}
    return str(client.post("/v1/completions", json=asked).json()["choices"][0]["text"])


CONTINUED = "user: describe the module END\nassistant: def main("


@pytest.mark.parametrize(
    ("more", "prompt"),
    [
        ({}, CONTINUED),
        ({"continue_final_message": True}, CONTINUED),
        ({"continue_final_message": True, "add_generation_prompt": False}, CONTINUED),
        ({"add_generation_prompt": False}, CONTINUED),
        ({"add_generation_prompt": True}, CONTINUED + " END\nassistant: "),
        ({"continue_final_message": False}, CONTINUED + " END\nassistant: "),
        ({"continue_final_message": False, "add_generation_prompt": False}, CONTINUED + " END\n"),
    ],
    ids=str,
)
def test_a_last_message_of_the_assistant_is_continued_unless_a_new_one_is_asked_for(
    client: TestClient, service: Service, more: Any, prompt: str
) -> None:
    assert content(ask(client, USER, BEGUN, **more)) == complete(client, service, prompt)


def test_another_last_message_is_answered(client: TestClient, service: Service) -> None:
    asked = "user: describe the module END\n"
    assert content(ask(client, USER)) == complete(client, service, asked + "assistant: ")
    ended = ask(client, USER, add_generation_prompt=False)
    assert content(ended) == complete(client, service, asked)


@pytest.mark.parametrize(
    ("last", "more", "sentence"),
    [
        (BEGUN, {"add_generation_prompt": True}, "are both true"),
        (USER, {}, "the last message is of the user"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
            {},
            "the last message has calls of tools",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_continued_is_refused(
    client: TestClient, last: Any, more: Any, sentence: str
) -> None:
    answer = ask(client, USER, last, continue_final_message=True, **more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "continue_final_message")
    assert sentence in error["message"]


@pytest.mark.parametrize(
    ("profile", "begun"),
    [
        ("own", ""),
        ("own", '{"title": "a'),
        ("own", ' {"title": "é🙂", "kind": "cla'),
        ("own", "\n{"),
        ("none", ' {"title": "é🙂", "kind": "cla'),
    ],
)
def test_a_constraint_is_of_the_message_and_its_continuation_together(
    client: TestClient, profile: str, begun: str
) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
    asked = {"response_format": named, "max_tokens": 80, "skipsearch": {"profile": profile}}
    answer = ask(client, USER, {"role": "assistant", "content": begun}, logprobs=True, **asked)
    jsonschema.validate(json.loads(begun.strip() + content(answer)), SCHEMA)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_a_beginning_that_the_constraint_excludes_is_refused_by_name(client: TestClient) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
    answer = ask(client, USER, BEGUN, response_format=named)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "def main(" in error["message"]


@pytest.mark.parametrize("begun", ["I look.", '<tool_call>\n{"name": "st'])
def test_a_required_call_is_no_continuation(client: TestClient, begun: str) -> None:
    said = {"role": "assistant", "content": begun}
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80}
    error = ask(client, USER, said, **asked).json()["error"]
    assert error["param"] == "tool_choice"
    assert "add_generation_prompt" in error["message"]
    for more in ({}, {"add_generation_prompt": True}):
        last = said if more else said | {"content": ""}
        answer = ask(client, USER, last, **asked, **more)
        assert answer.json()["choices"][0]["message"]["tool_calls"]


def test_a_complete_message_is_continued_with_nothing(client: TestClient) -> None:
    shape = {"type": "grammar", "grammar": 'start: "yes" | "no"'}
    said = {"role": "assistant", "content": "yes"}
    assert content(ask(client, USER, said, response_format=shape)) == ""


@pytest.mark.parametrize(
    ("begun", "is_open"),
    [("<think>\nI was", True), ("<think>\nI was.\n</think>\nSo", False), ("So", False)],
)
def test_thinking_goes_on_where_the_message_ended_inside_it(
    service: Service, begun: str, is_open: bool
) -> None:
    ids = service.tokenizer(begun).input_ids
    start = detect_thinking(service.tokenizer, "<think></think>", ids, begun)
    assert start is not None
    assert (start.is_open, start.is_over) == (is_open, not is_open)
