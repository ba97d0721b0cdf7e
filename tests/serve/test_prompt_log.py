"""`serve --log-prompts FILE` keeps what clients ask, for this user alone, as `tune` reads it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.tiny import tiny_llama

from skipsearch.decoding import Decoder
from skipsearch.errors import SkipSearchError
from skipsearch.models import adapt
from skipsearch.models.chat.chat_text import encode_chat, encode_prompt
from skipsearch.serve.app import build_app
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.limits import Limits
from skipsearch.serve.prompt_log import PromptLog
from skipsearch.serve.service import Service
from skipsearch.tasks import load_task

TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is love"}]


def open_log(path: Path, warnings: list[str] | None = None) -> PromptLog:
    told: list[str] = [] if warnings is None else warnings
    return PromptLog(path, letter_tokenizer(CHAT_TEMPLATE), told.append)


def ids_of(text: str) -> list[int]:
    return encode_chat(
        letter_tokenizer(CHAT_TEMPLATE), [*TALK[:1], {"role": "user", "content": text}]
    )


def test_tune_reads_the_tokens_that_the_server_read(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "asked.jsonl", letter_tokenizer(CHAT_TEMPLATE)
    asked = [ids_of(text) for text in ("what is love", "who am i", "where is it", "why not")]
    log = open_log(path)
    log.write(asked[:3])
    log.write(asked[3:])
    task = load_task(str(path))
    read = [encode_prompt(tokenizer, p.text) for p in (*task.calibration, *task.holdout)]
    assert sorted(read) == sorted(asked)
    assert not task.chat, "they are in the template already"


def test_the_file_is_this_users_alone_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    open_log(path).write([ids_of("one")])
    open_log(path).write([ids_of("two")])
    assert path.stat().st_mode & 0o777 == 0o600
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda path: path.mkdir(), "cannot be written"),
        (lambda path: (path.touch(), path.chmod(0o644)), "chmod 600"),
        (lambda path: os.mkfifo(path), "cannot be written|no regular file"),
    ],
    ids=["folder", "open to others", "pipe"],
)
def test_a_file_that_cannot_keep_prompts_is_refused(
    prepare: Any, sentence: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "asked.jsonl")
    with pytest.raises(SkipSearchError, match=sentence):
        open_log(tmp_path / "asked.jsonl")
    with pytest.raises(SkipSearchError, match="cannot be written"):
        open_log(tmp_path / "no such folder" / "asked.jsonl")


def test_a_full_disk_ends_the_log_with_one_sentence_and_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warnings: list[str] = []
    log = open_log(tmp_path / "asked.jsonl", warnings)

    def write(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    log.write([ids_of("one")])
    log.write([ids_of("two")])
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]


def test_each_request_is_kept_before_it_is_answered(tmp_path: Path) -> None:
    log = open_log(tmp_path / "asked.jsonl")
    model = adapt(tiny_llama(), letter_tokenizer(CHAT_TEMPLATE))
    service = Service(Decoder(model), APIKeys([]), Limits(), "tiny", prompt_log=log)
    with TestClient(build_app(service)) as client:
        for body in ({"messages": TALK}, {"messages": TALK, "model": "another"}):
            client.post("/v1/chat/completions", json={"max_tokens": 3, **body})
        client.post("/v1/completions", json={"prompt": "what is", "max_tokens": 3})
        client.post("/tokenize", json={"content": "not asked to be answered"})
    asked = [
        json.loads(line)["prompt"] for line in (tmp_path / "asked.jsonl").read_text().splitlines()
    ]
    assert asked == ["system:be brief\nuser:what is love\nai:", "what is"]
