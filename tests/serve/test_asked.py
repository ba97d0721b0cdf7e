"""Requests: the fields that OpenAI's API has, and the errors for wrong ones."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.letter_tokenizer import letter_tokenizer
from helpers.threads import one_thread
from helpers.tiny import tiny_llama
from pydantic import ValidationError

from skipsearch.decoding import Decoder
from skipsearch.models import adapt
from skipsearch.serve import app as routes
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.protocol import (
    MAX_ANSWERS,
    ChatCompletionRequest,
    CompletionRequest,
    parse_request,
)
from skipsearch.serve.service import Service

from .tiny_server import LIMITS

__all__ = ["one_thread"]
MANY = 5000
USER: dict[str, Any] = {"role": "user", "content": "x"}
UNKNOWN = {f"a{i}": 1 for i in range(MANY)}


@pytest.mark.parametrize(
    "prompt", ["", "a", ["a"], ["a", ""], [], [1], [0, 7], [[1]], [[1, 2], [3]], [[]]]
)
def test_a_prompt_is_a_text_tokens_or_several_of_either(prompt: Any) -> None:
    if prompt == []:
        with pytest.raises(APIError, match="empty list"):
            parse_request(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    else:
        asked = parse_request(CompletionRequest, json.dumps({"prompt": prompt}).encode())
        assert asked.prompt == prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert asked.prompts == (prompt if several else [prompt])


@pytest.mark.parametrize(
    ("kind", "data", "param"),
    [
        (CompletionRequest, {"prompt": MANY * [{}]}, "prompt"),
        (CompletionRequest, {"prompt": ["a", *MANY * [{}]]}, "prompt"),
        (CompletionRequest, {"prompt": [1, *MANY * [{}]]}, "prompt"),
        (CompletionRequest, {"prompt": [1, *MANY * [True]]}, "prompt"),
        (CompletionRequest, {"prompt": MANY * [-1]}, "prompt"),
        (CompletionRequest, {"prompt": MANY * [[{}]]}, "prompt"),
        (CompletionRequest, {"prompt": [MANY * [{}]]}, "prompt"),
        (CompletionRequest, {"prompt": [[1], *MANY * [[{}]]]}, "prompt"),
        (CompletionRequest, {"prompt": (MAX_ANSWERS + 1) * [[1]]}, "prompt"),
        (CompletionRequest, {"prompt": (MAX_ANSWERS + 1) * ["a"]}, "prompt"),
        (CompletionRequest, {"prompt": "x", "stop": MANY * [{}]}, "stop"),
        (
            CompletionRequest,
            {"prompt": "x", "logit_bias": dict.fromkeys(UNKNOWN, "x")},
            "logit_bias",
        ),
        (CompletionRequest, {"prompt": "x", **UNKNOWN}, "a0"),
        (CompletionRequest, {"prompt": "x", "skipsearch": UNKNOWN}, "skipsearch"),
        (CompletionRequest, {"prompt": "x", "stream_options": UNKNOWN}, "stream_options"),
        (ChatCompletionRequest, {"messages": MANY * [1]}, "messages"),
        (ChatCompletionRequest, {"messages": [USER | {"content": MANY * [1]}]}, "messages"),
        (
            ChatCompletionRequest,
            {"messages": [USER | {"content": [{"type": "text", "text": "x"} | UNKNOWN]}]},
            "messages",
        ),
        (ChatCompletionRequest, {"messages": [USER], "tools": MANY * [{}]}, "tools"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_wrong_request_is_given_up_at_its_first_wrong_entry(
    kind: type[ChatCompletionRequest | CompletionRequest], data: Any, param: str
) -> None:
    """An error takes about a kilobyte, and a body may have a million wrong entries."""
    with pytest.raises((ValidationError, APIError)) as first:
        kind.model_validate(data)
    assert isinstance(first.value, APIError) or first.value.error_count() == 1
    with pytest.raises(APIError) as refusal:
        parse_request(kind, json.dumps(data).encode())
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert len(refusal.value.message) < 300


def test_a_large_body_is_parsed_while_other_clients_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsing, answered = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        parsing.set()
        assert answered.wait(30), "another client had to wait for the parser"
        return parse_request(*given)

    monkeypatch.setattr(routes, "parse_request", slow)
    service = Service(Decoder(adapt(tiny_llama(), letter_tokenizer())), APIKeys([]), LIMITS, "tiny")
    with TestClient(routes.build_app(service)) as client, ThreadPoolExecutor(1) as other:
        large = other.submit(client.post, "/v1/completions", json={"prompt": 30_000 * [{}]})
        assert parsing.wait(30)
        assert client.get("/health").status_code == 200
        answered.set()
        assert large.result().status_code == 400


def test_clients_may_name_the_model_as_the_command_did() -> None:
    decoder = Decoder(adapt(tiny_llama(), letter_tokenizer()))
    service = Service(decoder, APIKeys([]), LIMITS, None, "folder/model.gguf")
    with TestClient(routes.build_app(service)) as client:
        for name in (service.name, "folder/model.gguf"):
            asked = {"model": name, "prompt": "a", "max_tokens": 1}
            answer = client.post("/v1/completions", json=asked).json()
            assert answer.get("model") == service.name, answer
            assert client.get(f"/v1/models/{name}").json()["id"] == service.name
        asked = {"model": "model.gguf", "prompt": "a"}
        assert client.post("/v1/completions", json=asked).status_code == 404
