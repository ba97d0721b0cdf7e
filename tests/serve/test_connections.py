"""Clients that send nothing, send slowly or do not read are closed; the others are served."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from skipsearch.serve.connections import Connections, GuardedProtocol
from skipsearch.serve.limits import Limits

from .conftest import KEYS, Running, expected, running_server


def run_in_thread(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in its own thread, since a browser test may hold the loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, main).result()


pytestmark = pytest.mark.xdist_group("connections")
FILES = 160
CLOSED_WITHIN_S = (
    20  # far above the limits of this server: what is tested is that a connection is closed at all
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(
        tmp_path_factory.mktemp("connections"),
        ",".join(KEYS),
        f"files={FILES}",
        "head_s=1",
        "idle_s=1",
    ) as running:
        yield running


def connect(server: Running) -> socket.socket:
    host, _, port = urlsplit(server.address).netloc.partition(":")
    return socket.create_connection((host, int(port)), timeout=CLOSED_WITHIN_S)


def answered(server: Running, method: str = "GET", path: str = "/health", **headers: str) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    body = (
        json.dumps({"prompt": "Hello", "max_tokens": 12, "temperature": 0})
        if method == "POST"
        else None
    )
    connection.request(
        method,
        path,
        body,
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[0]}"} | headers,
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    return content


def read_until_closed(connection: socket.socket, dribble: bytes = b"") -> bytes:
    """Return what the server sends until it closes the connection.

    Meanwhile a byte is sent to it ten times a second.
    """
    connection.settimeout(0.1 if dribble else CLOSED_WITHIN_S)
    content, deadline = b"", time.monotonic() + CLOSED_WITHIN_S
    while time.monotonic() < deadline:
        try:
            if dribble:
                connection.sendall(dribble)
            part = connection.recv(65536)
            if not part:
                return content
            content += part
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return content
    pytest.fail("the connection is still open")


def test_connections_that_say_nothing_keep_nobody_out(server: Running) -> None:
    """There are more such connections than files that the server may open."""
    with ExitStack() as silent:
        for _ in range(2 * FILES):
            silent.enter_context(connect(server))
        for _ in range(3):
            assert json.loads(answered(server))["status"] == "ok"
        completion = json.loads(answered(server, "POST", "/v1/completions"))
        assert completion["choices"][0]["text"] == expected("Hello", 12)
        assert psutil.Process(server.process.pid).num_fds() < FILES
    assert server.log().count("\n") <= 1, "one line, whatever clients do"
    assert "the most that this server keeps" in server.log()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("before", "dribble"),
    [
        (b"", b""),  # nothing at all
        (b"", b"G"),  # a head that never ends
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"x"),
        (
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"",
        ),  # a second request that never begins
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"G"),  # … or never ends
        (
            HEAD + b"Content-Length: 90000\r\n\r\n",
            b"x",
        ),  # a body that continues after its refusal: no key
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n", b"x"),
    ],
    ids=["silent", "head", "headers", "idle", "second head", "refused body", "unread body"],
)
def test_a_connection_that_keeps_the_server_waiting_is_closed(
    server: Running, before: bytes, dribble: bytes
) -> None:
    with connect(server) as connection:
        connection.sendall(before)
        answer = read_until_closed(connection, dribble)
    if before.endswith(b"\r\n\r\n"):
        assert answer.split(b" ")[1] == (b"401" if before.startswith(b"POST") else b"200")
    answered(server)


def test_a_connection_serves_one_request_after_another(server: Running) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=30)
    connection.connect()
    first = connection.sock
    for _ in range(5):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        time.sleep(0.3)  # more in all than a head may take
    assert connection.sock is first
    connection.close()


# --- what a server in a process cannot be brought to do at will


class Transport(asyncio.Transport):
    """A transport that keeps what a protocol writes. unsent_bytes: what the client has not read."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.unsent_bytes, self.is_aborted, self.is_closed = b"", 0, False, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Bench:
    """Connections without a network to an application that answers if `may_answer` is set."""

    def __init__(self, limits: Limits):
        self.refused = 0
        self.connections = Connections(limits, self._count)
        self.may_answer = asyncio.Event()
        self._config, self._state = Config(self._app, log_level="error"), ServerState()

    def _count(self) -> None:
        self.refused += 1

    async def _app(
        self,
        scope: object,
        receive: Callable[[], Awaitable[object]],
        send: Callable[[object], Awaitable[None]],
    ) -> None:
        await self.may_answer.wait()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"ok"})

    def open(self, *parts: bytes) -> tuple[GuardedProtocol, Transport]:
        protocol = self.connections.protocol(
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )
        transport = Transport()
        protocol.connection_made(transport)
        for part in parts:
            protocol.data_received(part)
        return protocol, transport


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
FEW = Limits(connections=3, head_s=30, idle_s=30, unread_s=30)


def lose(*connections: tuple[GuardedProtocol, Transport]) -> None:
    for protocol, _ in connections:
        protocol.connection_lost(None)


def test_the_longest_idle_connection_is_closed_for_a_new_one_but_none_in_use() -> None:
    async def main() -> None:
        bench = Bench(FEW)
        busy, body, head = (
            bench.open(REQUEST),
            bench.open(REQUEST[:-2] + b"Content-Length: 9\r\n\r\n123"),
            bench.open(REQUEST[:9]),
        )
        new = bench.open(REQUEST)
        assert [transport.is_aborted for _, transport in (busy, body, head, new)] == [
            False,
            True,
            False,
            False,
        ]
        lose(body)
        newer = bench.open(REQUEST)
        assert [transport.is_aborted for _, transport in (busy, head, new, newer)] == [
            False,
            True,
            False,
            False,
        ]
        lose(head)
        assert bench.refused == 0
        lose(busy, new, newer)

    run_in_thread(main())


def test_where_all_are_being_answered_a_new_one_is_refused_until_an_answer_is_complete() -> None:
    async def main() -> None:
        bench = Bench(FEW)
        busy = [bench.open(REQUEST) for _ in range(3)]
        for count in (1, 2):
            refused, transport = bench.open()
            assert transport.written.startswith(b"HTTP/1.1 503 ")
            head, _, body = transport.written.partition(b"\r\n\r\n")
            assert f"content-length: {len(body)}".encode() in head.lower()
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert transport.is_closed
            assert bench.refused == count
            lose((refused, transport))
        bench.may_answer.set()
        while not all(transport.written for _, transport in busy):
            await asyncio.sleep(0)
        _, transport = bench.open(REQUEST)
        assert not transport.is_closed
        assert [transport.is_aborted for _, transport in busy] == [True, False, False]

    run_in_thread(main())


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_reads_nothing_of_its_answer_is_closed_and_one_that_reads_slowly_is_not(
    reads: bool,
) -> None:
    async def main() -> None:
        bench = Bench(replace(FEW, unread_s=0.02))
        protocol, transport = bench.open(REQUEST)
        transport.unsent_bytes = 100_000
        protocol.pause_writing()
        protocol.data_received(b"x")  # a client that does not listen may talk
        deadline = time.monotonic() + (0.3 if reads else CLOSED_WITHIN_S)
        while not transport.is_aborted and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
            transport.unsent_bytes -= reads
        assert transport.is_aborted is not reads
        lose((protocol, transport))

    run_in_thread(main())


def test_an_error_that_comes_for_each_connection_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        connections, loop = Connections(FEW), asyncio.get_running_loop()
        for _ in range(100):
            connections.handle_error(
                loop,
                {
                    "message": "socket.accept() out of system resource",
                    "exception": OSError(errno.EMFILE, "Too many open files"),
                },
            )
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "ulimit -n" in caplog.text
        connections.handle_error(loop, {"message": "something else"})
        assert "something else" in caplog.text

    run_in_thread(main())
