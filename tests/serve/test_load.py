"""Two hundred clients at once get right answers, and memory stays below its bound.

SECURITY.md names the bound.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from serve.test_robustness import ASKED, figure, quiet, serves_on

from .conftest import KEYS, Running, expected, running_server
from .tiny_server import LIMITS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]
CLIENTS, REQUESTS = 200, 2_000
PROMPTS = (
    "def f(x):",
    "a b c a b c",
    "Hello",
    "zzz",
    "one two one two one",
    "import os",
    "long " * 60,
    "longer still " * 60,
)
CHATS = ("Hello", "a b c a b c", "say it")
STOP = list("abcdefghijklmnop")  # one of them is written soon

SLOT_BYTES = 5 * 2 * 16 * 8  # layers, keys and values, head dimension, float64
CROWD = {"positions": 2**20, "max_queue": 256, "prefix_bytes": 10**7, "batch_slots": 2**14}
LONGEST = 2 * (13 * 60 + 1 + 24 + 128)  # slots that a cache of the longest text may have
RUNNING_BYTES = LIMITS.max_num_seqs * 2 * LONGEST * SLOT_BYTES
SHARED_BYTES = 2 * CROWD["batch_slots"] * SLOT_BYTES  # as large while it grows
PER_CLIENT_BYTES = 256 * 1024  # of a connection, its request and its answer
FLAT_BYTES = 16 * 2**20  # what the second half of the load may add


class Load:
    """Clients that request text of every kind, check the answers, and sometimes leave."""

    def __init__(self, server: Running):
        self.address = urlsplit(server.address).netloc
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self._lock = threading.Lock()

    def run(self, requests: range) -> None:
        """Send these requests, each by one of the clients."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(self._ask, requests))

    def _ask(self, number: int) -> None:
        choose = random.Random(number)
        path, asked, text = self._request(choose)
        leaves, stream = choose.random() < 0.2, bool(asked.get("stream"))
        connection = http.client.HTTPConnection(self.address, timeout=300)
        try:
            connection.request(
                "POST",
                path,
                json.dumps(asked),
                {
                    "Content-Type": "application/json",
                    "Authorization": f"Bearer {choose.choice(KEYS)}",
                },
            )
            if leaves:
                time.sleep(choose.random())
                self._count("left")
                return
            answer = connection.getresponse()
            content = answer.read().decode()
            found = _text(content, stream) if answer.status == 200 else content
            self._count("answered")
            if answer.status != 200 or (text is not None and found != text):
                with self._lock:
                    self.wrong.append((answer.status, asked, found))
        finally:
            connection.close()

    def _request(self, choose: random.Random) -> tuple[str, dict[str, Any], str | None]:
        """Return (path, body, expected text). The text of a sample is None."""
        stream = {"stream": choose.random() < 0.5}
        if choose.random() < 0.3:  # without a limit, on a model that was made for a million tokens
            said = choose.choice(CHATS)
            asked = {
                "messages": [{"role": "user", "content": said}],
                "temperature": 0,
                "stop": STOP,
            }
            return (
                "/v1/chat/completions",
                asked | stream,
                _until_stop(expected(said, 80, chat=True)),
            )
        prompt, tokens = choose.choice(PROMPTS), choose.randint(1, 24)
        asked = ASKED | stream | {"prompt": prompt, "max_tokens": tokens}
        if choose.random() < 0.2:
            return (
                "/v1/completions",
                asked | {"temperature": 1.0, "seed": choose.randint(0, 99), "logprobs": 2},
                None,
            )
        return "/v1/completions", asked, expected(prompt, tokens)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _text(content: str, stream: bool) -> str:
    events = (
        [json.loads(line[6:]) for line in content.splitlines() if line.startswith("data: {")]
        if stream
        else [json.loads(content)]
    )
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        choice.get("text")
        or (choice.get("delta") or choice.get("message") or {}).get("content")
        or ""
        for choice in choices
    )


def _until_stop(text: str) -> str:
    end = min(text.index(letter) for letter in STOP if letter in text)
    return text[:end]


class Memory(threading.Thread):
    """Resident bytes of a process: now, and the most so far."""

    def __init__(self, process: psutil.Process):
        super().__init__(daemon=True)
        self.process, self.peak, self.ended = process, 0, threading.Event()

    @property
    def now(self) -> int:
        return int(self.process.memory_info().rss)

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("together", [False, True])
def test_memory_is_flat_and_bounded_while_two_hundred_clients_ask(
    tmp_path: Path, together: bool
) -> None:
    for prompt in PROMPTS:
        for tokens in range(1, 25):
            expected(prompt, tokens)
    words = [f"{name}={number}" for name, number in CROWD.items()]
    with running_server(tmp_path, ",".join(KEYS), *words, *["together"] * together) as server:
        memory, load = Memory(psutil.Process(server.process.pid)), Load(server)
        load.run(range(-20, 0))  # of every kind, so that what is loaded and allocated once is there
        quiet(server)
        start = memory.now
        memory.start()
        marks = []
        for first in range(0, REQUESTS, REQUESTS // 4):
            load.run(range(first, first + REQUESTS // 4))
            quiet(server)
            marks.append(memory.now)
        memory.ended.set()
        bound = (
            start
            + RUNNING_BYTES
            + CROWD["prefix_bytes"]
            + together * SHARED_BYTES
            + CLIENTS * PER_CLIENT_BYTES
        )
        drafted, accepted = (
            figure(server, f"vllm:spec_decode_num_{name}_tokens_total")
            for name in ("draft", "accepted")
        )
        print(
            f"\ntogether {together}: {dict(load.counts)}, {accepted:.0f} of {drafted:.0f} drafted "
            "tokens accepted; MB resident: "
            f"{start / 1e6:.0f} at the start, then "
            f"{', '.join(f'{mark / 1e6:.0f}' for mark in marks)} after each quarter, "
            f"{memory.peak / 1e6:.0f} at most; bound {bound / 1e6:.0f}"
        )
        assert not load.wrong, load.wrong[:3]
        assert sum(load.counts.values()) == 20 + REQUESTS
        assert load.counts["left"] > REQUESTS / 8
        assert 0 < accepted < drafted
        assert memory.peak < bound
        assert marks[3] - marks[1] < FLAT_BYTES
        serves_on(server)
