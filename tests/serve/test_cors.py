"""Pages of other sites in a browser: only those that `--cors` names may call the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fastapi.testclient import TestClient
from helpers.letter_tokenizer import letter_tokenizer
from helpers.threads import one_thread
from helpers.tiny import tiny_llama

from skipsearch.decoding import Decoder
from skipsearch.errors import SkipSearchError
from skipsearch.models import adapt
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.cors import read_origins
from skipsearch.serve.service import Service

from .tiny_server import LIMITS

__all__ = ["one_thread"]
SITE, OTHER = "http://localhost:3000", "http://other.example"
KEY = {"Authorization": "Bearer k"}


@contextmanager
def served(*origins: str) -> Iterator[TestClient]:
    decoder = Decoder(adapt(tiny_llama(), letter_tokenizer()))
    service = Service(decoder, APIKeys(["k"]), LIMITS, "tiny")
    app = build_app(service, local_only=True, cors_origins=origins)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def preflight(client: TestClient, origin: str) -> tuple[int, str | None]:
    """Return (status, the origin that is allowed)."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = client.options("/v1/completions", headers=asked)
    return answer.status_code, answer.headers.get("access-control-allow-origin")


def complete(client: TestClient, origin: str, stream: bool = False, **headers: str) -> object:
    """Return (status, the origin that may read the answer)."""
    answer = client.post(
        "/v1/completions",
        json={"prompt": "a", "max_tokens": 2, "stream": stream},
        headers={"Origin": origin} | headers,
    )
    return answer.status_code, answer.headers.get("access-control-allow-origin")


def test_without_the_option_no_page_is_allowed() -> None:
    with served() as client:
        assert preflight(client, SITE) == (405, None)
        assert complete(client, SITE, **KEY) == (200, None)


def test_a_named_site_is_allowed_and_still_needs_a_key() -> None:
    with served(SITE) as client:
        assert preflight(client, SITE) == (200, SITE)
        assert preflight(client, OTHER) == (400, None)
        for stream in (False, True):
            assert complete(client, SITE, stream, **KEY) == (200, SITE)
        assert complete(client, OTHER, **KEY) == (200, None)
        assert complete(client, SITE) == (401, SITE), "a page reads why it was refused"


def test_a_star_allows_every_page_but_no_other_host_name() -> None:
    """A page reaches the server under a name of its own by DNS rebinding."""
    with served("*") as client:
        assert preflight(client, OTHER) == (200, "*")
        assert complete(client, OTHER) == (401, "*")
        assert complete(client, OTHER, Host="other.example", **KEY) == (421, None)


def test_origins_are_repeated_or_separated_by_commas() -> None:
    assert read_origins([f"{SITE},{OTHER}", "App://Obsidian.md", " * "]) == [
        SITE,
        OTHER,
        "app://obsidian.md",
        "*",
    ]


@pytest.mark.parametrize(
    "word", ["localhost", "http://a.example/", "http://a.example/page", "null", "http://*.a", "//a"]
)
def test_what_is_no_origin_is_refused(word: str) -> None:
    with pytest.raises(SkipSearchError, match="give an origin"):
        read_origins([word])
