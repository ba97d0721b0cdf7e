"""Fixtures: a running server, and the answers that its model gives without it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from helpers.tiny import FullModel, tiny_llama

import skipsearch

ROOT = Path(skipsearch.__file__).parents[1]
KEYS = ("first-key", "second-key")


@dataclass
class Running:
    """A server in a process of its own. log: what it has written on stderr so far."""

    address: str
    process: subprocess.Popen[bytes]
    log: Callable[[], str]


@contextmanager
def running_server(
    folder: Path, keys: str | None = ",".join(KEYS), *words: str
) -> Iterator[Running]:
    folder.mkdir(parents=True, exist_ok=True)
    told, log = folder / "address", folder / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (
        {} if keys is None else {"SKIPSEARCH_API_KEY": keys}
    )
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("tiny_server.py")), str(told), *words],
            stderr=errors,
            env=environment,
        )
        try:
            deadline = time.monotonic() + 120
            while not told.exists() or not told.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)
            yield Running(told.read_text(), process, log.read_text)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@cache
def full_model() -> FullModel:
    return FullModel(tiny_llama(context=512))


def expected(prompt: str, tokens: int, chat: bool = False) -> str:
    """Return the greedy answer of the model to a prompt, computed without skipsearch."""
    tokenizer = letter_tokenizer(CHAT_TEMPLATE)
    ids = tokenizer(f"user:{prompt}\nai:" if chat else prompt).input_ids
    return str(tokenizer.decode(full_model().greedy(ids, tokens), skip_special_tokens=True))
