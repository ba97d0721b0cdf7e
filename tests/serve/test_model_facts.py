"""Addresses of llama.cpp's server and of Ollama that say what the model is, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.threads import one_thread
from helpers.tiny import tiny_llama

import skipsearch
from skipsearch.decoding import Decoder
from skipsearch.models import adapt
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.model_facts import describe_server
from skipsearch.serve.service import Service

from .tiny_server import LIMITS

__all__ = ["one_thread"]
TOKENIZER = letter_tokenizer(CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    decoder = Decoder(adapt(tiny_llama(), TOKENIZER))
    service = Service(decoder, APIKeys(["k"]), LIMITS, "tiny")
    with TestClient(build_app(service), headers={"Authorization": "Bearer k"}) as client:
        yield client


def post(client: TestClient, path: str, **fields: Any) -> Any:
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_becomes_tokens_and_text_again(client: TestClient) -> None:
    ids = list(TOKENIZER("abc")["input_ids"])
    assert post(client, "/tokenize", content="abc", add_special=True)["tokens"] == ids
    tokens = post(client, "/tokenize", content="abc", parse_special=True)["tokens"]
    assert tokens == ids[1:]
    assert post(client, "/tokenize", content="")["tokens"] == []
    assert post(client, "/detokenize", tokens=tokens)["content"] == "abc"
    pieces = post(client, "/tokenize", content="abc", with_pieces=True)["tokens"]
    assert pieces == [{"id": i, "piece": word} for i, word in zip(tokens, "abc", strict=True)]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/tokenize", {}, "the request lacks content"),
        ("/tokenize", {"content": 3}, "content is not as it should be"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special is not"),
        ("/tokenize", {"content": "\ud800"}, "half of a character"),
        ("/tokenize", [], "the request is not as it should be"),
        ("/detokenize", {"tokens": "abc"}, "tokens is not as it should be"),
        ("/detokenize", {"tokens": [1, 9999]}, "tokens has 9999"),
        ("/detokenize", {"tokens": [-1]}, "tokens is not as it should be"),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: TestClient, path: str, body: Any, sentence: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]


def test_programs_find_the_model(client: TestClient) -> None:
    props = client.get("/props").json()
    assert props["model_alias"] == "tiny"
    assert props["chat_template"] == CHAT_TEMPLATE
    assert props["total_slots"] == LIMITS.max_num_seqs
    assert props["default_generation_settings"]["n_ctx"] > 0
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert [model["name"] for model in client.get("/api/tags").json()["models"]] == ["tiny"]
    assert client.get("/api/version").json() == {"version": skipsearch.__version__}


def test_the_sampling_of_requests_that_name_none_is_shown() -> None:
    recommended = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    decoder = Decoder(adapt(tiny_llama(), TOKENIZER))
    service = Service(decoder, APIKeys([]), LIMITS, sampling_defaults=recommended)
    shown = describe_server(service)["default_generation_settings"]["params"]
    assert shown == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.05,
    }


@pytest.mark.parametrize("path", ["/props", "/api/tags"])
def test_they_need_a_key(client: TestClient, path: str) -> None:
    assert client.get(path, headers={"Authorization": "Bearer other"}).status_code == 401
