"""The server's memory for texts: K/V of their length, up to the documented bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from fastapi.testclient import TestClient
from helpers.command import cmd, run_in_process
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.table_model import TableModel
from helpers.threads import one_thread
from helpers.tiny import tiny_llama, tiny_model_and_reference, with_tokenizer

from skipsearch.decoding import Decoder
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.kv_cache import KVCache
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.limits import DEFAULT_CONTEXT, Limits
from skipsearch.serve.service import Service

__all__ = ["one_thread"]
ANY_LETTER = list("abcdefghijklmnop")  # one of them is written soon


def without_context() -> ModelAdapter:
    """Return a model whose config has no context length, as those of Mamba-2 and Bloom."""
    tokenizer = letter_tokenizer(CHAT_TEMPLATE)
    model = TableModel(len(tokenizer), layers=2)
    model.tokenizer = tokenizer
    return model


def of_a_million_positions() -> ModelAdapter:
    return adapt(tiny_llama(layers=2, hidden=16, context=2**20), letter_tokenizer(CHAT_TEMPLATE))


@contextmanager
def serving(model: ModelAdapter, **limits: Any) -> Iterator[tuple[TestClient, Service]]:
    service = Service(Decoder(model), APIKeys([]), Limits(**limits), "tiny")
    with TestClient(build_app(service)) as client:
        yield client, service


@contextmanager
def capacities() -> Iterator[list[int]]:
    """Collect the numbers of slots of all buffers that are allocated."""
    seen: list[int] = []
    real = KVCache.get_buffers

    def buffers(self: KVCache, *given: Any) -> Any:
        keys, values = real(self, *given)
        seen.append(keys.shape[0] * keys.shape[2])
        return keys, values

    with patch.object(KVCache, "get_buffers", buffers):
        yield seen


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_chat_without_max_tokens_takes_what_its_text_needs(
    together: bool, logprobs: bool
) -> None:
    with (
        capacities() as slots,
        serving(of_a_million_positions(), batch_passes=together) as (client, service),
    ):
        for said in ("a", "b", "c", "d"):
            answer = client.post(
                "/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": said}],
                    "stop": ANY_LETTER,
                    "logprobs": logprobs,
                },
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["total_tokens"] < 200
    assert max(slots) <= (4 * 257 if together else 256)
    assert len(service.scheduler._prefix_cache._idle) == 4


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_model_that_names_no_context_has_a_limit(path: str) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}]}
    asked = (
        {"prompt": asked["prompt"]} if path == "completions" else {"messages": asked["messages"]}
    )
    with capacities() as slots, serving(without_context()) as (client, _):
        prompt = client.post(f"/v1/{path}", json=asked | {"max_tokens": 1}).json()["usage"][
            "prompt_tokens"
        ]
        for most in (10**9, DEFAULT_CONTEXT - prompt):
            more = {"max_tokens": most, "stop": ANY_LETTER, "logit_bias": {"5": 1}}
            assert client.post(f"/v1/{path}", json=asked | more).status_code == 200
        assert client.post(f"/v1/{path}", json=asked | {"stop": ANY_LETTER}).status_code == 200
    assert max(slots) <= 256


def test_a_context_may_be_given_and_counts_the_prompt() -> None:
    with serving(small_model(), context=40) as (client, _):

        def ask(prompt: str, **more: Any) -> Any:
            return client.post(
                "/v1/completions",
                json={"prompt": prompt, "temperature": 0, "ignore_eos": True} | more,
            )

        assert ask("a" * 20, max_tokens=19).json()["usage"]["total_tokens"] == 40  # with <s>
        for asked in ({"max_tokens": 20}, {"max_tokens": 10**9}, {}):
            answer = ask("a" * 35, **asked).json()
            assert answer["usage"]["total_tokens"] == 40
            assert answer["choices"][0]["finish_reason"] == "length"
        error = ask("a" * 39).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert "raise the server's --context" in error["message"]
    with serving(small_model(), context=10**6) as (client, service):
        assert (
            ask("a" * 20, max_tokens=10**6).json()["usage"]["total_tokens"]
            == service.model.spec.context_length
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_in_the_form_that_agents_read(stream: bool) -> None:
    """They make the conversation shorter when they see this code, or this sentence."""
    with serving(small_model()) as (client, service):
        said = {"role": "user", "content": "a" * service.context}
        asked = {"messages": [said], "stream": stream, "max_tokens": 5}
        answer = client.post("/v1/chat/completions", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert (error["param"], error["type"]) == ("messages", "invalid_request_error")
    sentence = r"maximum context length is (\d+) tokens\. However, your messages resulted in (\d+)"
    numbers = re.search(sentence, error["message"])
    assert numbers is not None
    tokens = len(letter_tokenizer().tokenize("<s>user:\nai:")) + service.context
    assert [int(number) for number in numbers.groups()] == [service.context, tokens]
    assert "--context" not in error["message"]


def small_model() -> ModelAdapter:
    return with_tokenizer(tiny_model_and_reference()[0], letter_tokenizer(CHAT_TEMPLATE))


def test_the_kv_of_finished_texts_is_bounded_in_bytes_and_the_latest_stays() -> None:
    with serving(small_model()) as (client, service):
        client.post("/v1/completions", json={"prompt": "a" * 30, "max_tokens": 2})
        one = service.scheduler._prefix_cache.bytes
    with serving(small_model(), prefix_bytes=3 * one + 1, prefix_cache_size=100) as (
        client,
        service,
    ):
        for letter in "abcdefghij":
            client.post("/v1/completions", json={"prompt": letter * 30, "max_tokens": 2})
            assert service.scheduler._prefix_cache.bytes <= 3 * one

        def cached(letter: str) -> int:
            answer = client.post(
                "/v1/completions", json={"prompt": letter * 30, "max_tokens": 2}
            ).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("j") == 30
        assert cached("a") <= 1  # <s>
    with serving(small_model(), prefix_bytes=0) as (client, service):
        client.post("/v1/completions", json={"prompt": "a" * 30, "max_tokens": 2})
        assert service.scheduler._prefix_cache._idle == []


def test_the_limits_of_the_command_are_those_of_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Limits] = []
    monkeypatch.setattr(
        "skipsearch.serve.server.run_server",
        lambda decoder, host, port, limits, *rest: found.append(limits),
    )
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *cmd("serve --model demo --profile none --engine lean --prefix-memory 0.5 --context 900"),
    )
    assert code == 0, said
    assert found == [replace(Limits(), prefix_bytes=500_000_000, context=900)]
