"""A failure of the server itself: the client gets one sentence, the log one line, and the
connection stays open.
"""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.served import served
from helpers.threads import one_thread

from skipsearch.serve.responses import Choice
from skipsearch.serve.service import Service

from .test_structured import USER, make_service

__all__ = ["one_thread"]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
ASKED = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(make_service()) as address:
        yield urlsplit(address).netloc


@pytest.fixture
def connection(address: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(address, timeout=60)
    yield connection
    connection.close()


def post(connection: http.client.HTTPConnection, path: str, **fields: Any) -> tuple[int, str]:
    asked = ASKED | {"messages": USER} | fields
    if path == "/v1/responses":
        asked = {"input": USER, "temperature": 0} | fields
    connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def break_down(*_: Any) -> Any:
    raise KeyError("secret text of a request")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["prompt", "answer", "stream"])
def test_a_failure_is_one_sentence_and_one_line(
    connection: http.client.HTTPConnection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    where: str,
) -> None:
    connection.connect()
    first = connection.sock
    with monkeypatch.context() as broken:
        if where == "prompt":
            broken.setattr(Service, "_tokenize_prompts", break_down)
        else:
            broken.setattr(Choice, "add_round", break_down)
        status, text = post(connection, path, stream=where == "stream")
    assert status == (200 if where == "stream" else 500)
    assert "its own fault" in text
    assert "secret" not in text
    (record,) = caplog.records
    assert "KeyError" in record.getMessage()
    assert record.exc_info is None
    assert "secret" not in caplog.text
    assert "\n" not in caplog.text.rstrip("\n")
    assert post(connection, "/v1/chat/completions")[0] == 200
    assert connection.sock is first, "the connection was closed"


def test_the_traceback_is_logged_with_details(
    connection: http.client.HTTPConnection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "skipsearch.serve")
    with monkeypatch.context() as broken:
        broken.setattr(Service, "_tokenize_prompts", break_down)
        post(connection, "/v1/chat/completions")
    assert "Traceback" in caplog.text
