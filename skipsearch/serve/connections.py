"""Connections: how many the server keeps open, and how long one may keep the server waiting for its
client.

uvicorn waits for the head of a request as long as its client likes, and counts requests, not
connections. So clients that say nothing could take every file descriptor, and the server would
answer nobody else, not even at /health."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from skipsearch.serve.api_errors import APIError
from skipsearch.serve.limits import Limits

log = logging.getLogger("skipsearch.serve")

ACCEPT_BATCH = (
    16  # connections that asyncio accepts before the first of them is looked at, three times over
)
OTHER_DESCRIPTORS = 32  # for everything else that is opened while the server runs
QUEUE = 512  # connections that the system keeps until they are accepted


class Connections:
    """The connections of one server. `waiting` has those that wait for their client, the one that
    has waited longest first.

    A connection waits for its client while no whole request of it is being answered, or its client
    does not read the answer."""

    def __init__(self, limits: Limits, on_refusal: Callable[[], None] = lambda: None):
        self.limits, self.on_refusal = limits, on_refusal
        self.max_open = max(
            1, min(limits.connections, _free_descriptors() - 4 * ACCEPT_BATCH - OTHER_DESCRIPTORS)
        )
        self.waiting: dict[GuardedProtocol, None] = {}
        self._logged: set[str] = set()

    def make_place(self, n_open: int) -> bool:
        """Return whether one more connection may be open. At the limit, the one that has waited
        longest for its client is closed for it.
        """
        if n_open < self.max_open:
            return True
        self.log_once(
            f"{self.max_open} connections are open, the most that this server keeps: the one that "
            "waits longest for its client "
            "is closed for a new one"
        )
        if not self.waiting:
            self.on_refusal()
            return False
        next(iter(self.waiting)).close_now()
        return True

    def log_once(self, sentence: str) -> None:
        """Log a warning, unless it was logged before: what a client can repeat must not fill a
        disk.
        """
        if sentence not in self._logged:
            self._logged.add(sentence)
            log.warning(sentence)

    def protocol(self, **options: Any) -> GuardedProtocol:
        """Make the protocol of a new connection, as uvicorn asks for it."""
        return GuardedProtocol(self, **options)

    def handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of the event loop. One that says that no connection can be accepted comes
        many times a second.
        """
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOBUFS,
            errno.ENOMEM,
        ):
            self.log_once(
                f"no connection can be accepted for now ({error.strerror}): raise the limit of "
                "open files (`ulimit -n`)"
            )
        else:
            loop.default_exception_handler(context)


class GuardedProtocol(H11Protocol):
    """A connection that is closed if its client keeps the server waiting."""

    def __init__(self, guard: Connections, **options: Any):
        super().__init__(**options)
        limits = guard.limits
        # None: the route that reads a body has its own limit, and answers when it is reached.
        self._seconds = {
            "head": limits.head_s,
            "body": None,
            "idle": limits.idle_s,
            "unread": limits.unread_s,
        }
        self._guard = guard
        self._refused = False
        self._reads_head = True  # a client that connects has a request
        self._is_unread = False  # its client reads more slowly than the server writes
        self._waits_for: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0  # when the timer was started

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._guard.make_place(len(self.connections)):
            super().connection_made(transport)
            self._update()
        else:
            self._refused = True
            transport.write(_refusal(self._guard.max_open))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._reads_head = True
        self._update()

    def on_response_complete(self) -> None:
        self._reads_head = False
        super().on_response_complete()  # begins with the next request, if it is there already
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_unread = True
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_unread = False
        self._update()

    def close_now(self) -> None:
        """Close without sending what is not sent yet."""
        self._wait_for(None)
        self.transport.abort()

    def _update(self) -> None:
        """Find out what the connection waits for now, and start its time if that is something else
        than before.
        """
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._is_unread:
            waits_for: str | None = "unread"
        elif is_answering:
            waits_for = "body" if self.cycle.more_body else None
        else:
            waits_for = "head" if self._reads_head else "idle"
        if waits_for != self._waits_for:
            self._wait_for(waits_for)

    def _wait_for(self, what: str | None) -> None:
        self._waits_for = what
        self._guard.waiting.pop(self, None)
        if what is not None:
            self._guard.waiting[self] = None
        self._start_timer(None if what is None else self._seconds[what])

    def _start_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._timer = self.loop.call_later(seconds, self._give_up, seconds)

    def _give_up(self, seconds: float) -> None:
        """Close the connection, unless its client has read a part of the answer meanwhile."""
        if 0 < self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._start_timer(seconds)
        else:
            self.close_now()


def widen_queue(listener: Any) -> None:
    """Let the system keep more new connections than asyncio accepts at a time. listener: a socket
    that listens.
    """
    with socket.socket(fileno=os.dup(listener.fileno())) as same:
        same.listen(QUEUE)


def _free_descriptors() -> int:
    """Return how many files this process may still open; a large number if the system does not
    say.
    """
    with suppress(ImportError, OSError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            return limit - len(os.listdir("/dev/fd"))
    return 2**20


def _refusal(max_open: int) -> bytes:
    fault = APIError(
        503,
        f"{max_open} connections are busy, the most that this server keeps: try again soon",
        code="too_many_connections",
    )
    body = json.dumps(fault.body).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: "
        b"%d\r\nRetry-After: 1\r\n"
        b"Connection: close\r\n\r\n%s" % (len(body), body)
    )
