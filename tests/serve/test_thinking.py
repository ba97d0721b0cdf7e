"""Thinking in a chat: what the template is told about it, and what a client gets of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.threads import one_thread
from helpers.tiny import tiny_llama

from skipsearch.decoding import Decoder
from skipsearch.models import adapt
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.service import Service

from .tiny_server import LIMITS, RECIPE

__all__ = ["one_thread"]
WITH_VARIABLES = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}{% endif %}"
)


def client_of(template: str) -> Iterator[TestClient]:
    decoder = Decoder(adapt(tiny_llama(context=512), letter_tokenizer(template)), RECIPE)
    with TestClient(build_app(Service(decoder, APIKeys([]), LIMITS, "tiny"))) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    yield from client_of(WITH_VARIABLES)


def ask(client: TestClient, **more: Any) -> Any:
    messages = [{"role": "user", "content": "say it"}]
    fields = {"messages": messages, "max_tokens": 1, "temperature": 0}
    return client.post("/v1/chat/completions", json=fields | more)


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "no"),
        ({"chat_template_kwargs": {"enable_thinking": True, "unread": [1, {"a": None}]}}, ""),
        ({"chat_template_kwargs": None, "reasoning_effort": "low"}, "effort low"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"},
            "effort high",
        ),
    ],
)
def test_a_template_gets_the_variables_of_a_request(
    client: TestClient, fields: dict[str, Any], added: str
) -> None:
    without = ask(client).json()["usage"]["prompt_tokens"]
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == without + len(added)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        *(
            ({"chat_template_kwargs": {name: 1}}, name)
            for name in ("messages", "tools", "add_generation_prompt", "chat_template", "bos_token")
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
)
def test_variables_that_the_server_sets_itself_are_refused_by_name(
    client: TestClient, fields: dict[str, Any], name: str
) -> None:
    answer = ask(client, **fields)
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(fields))
