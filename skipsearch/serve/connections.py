"""Connections: how many the server keeps open, and how long one may make the server wait for its
client.

uvicorn waits for the head of a request for any time, and it limits requests instead of connections.
So idle clients could take every file descriptor, and the server could not answer anybody else, not
even at /health.
"""

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

# Connections that asyncio accepts at a time. Up to three times as many may be open before
# `make_place` sees the first.
ACCEPT_BATCH = 16
OTHER_DESCRIPTORS = 32  # for other files that the server opens
QUEUE = 512  # connections that the operating system queues until they are accepted


class Connections:
    """The connections of one server.

    A connection waits for its client if it has no complete request in progress, or if the client
    does not read the response.
    waiting: the connections that wait for their client, longest first.
    """

    def __init__(self, limits: Limits, on_refusal: Callable[[], None] = lambda: None):
        self.limits, self.on_refusal = limits, on_refusal
        self.max_open = max(
            1, min(limits.connections, _free_descriptors() - 4 * ACCEPT_BATCH - OTHER_DESCRIPTORS)
        )
        self.waiting: dict[GuardedProtocol, None] = {}
        self._logged: set[str] = set()

    def make_place(self, n_open: int) -> bool:
        """Return whether one more connection may be open.

        At the limit, close the connection that has waited longest for its client to make that
        possible.
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
        """Log a warning unless it was logged before.

        So a client cannot fill the disk by causing it again and again.
        """
        if sentence not in self._logged:
            self._logged.add(sentence)
            log.warning(sentence)

    def protocol(self, **options: Any) -> GuardedProtocol:
        """Make the protocol object of a new connection, as uvicorn requests it."""
        return GuardedProtocol(self, **options)

    def handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of the event loop.

        An error that says that no connection can be accepted occurs many times a second, and is
        logged once.
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
    """A connection that is closed if its client makes the server wait too long."""

    def __init__(self, guard: Connections, **options: Any):
        super().__init__(**options)
        limits = guard.limits
        # body: None, because the route that reads it has a timeout and answers with an error.
        self._seconds = {
            "head": limits.head_s,
            "body": None,
            "idle": limits.idle_s,
            "unread": limits.unread_s,
        }
        self._guard = guard
        self._refused = False
        self._reads_head = True  # a new connection begins with a request
        self._is_unread = False  # the client reads more slowly than the server writes
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
        super().on_response_complete()  # starts the next request, if it has arrived already
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
        """Close without sending the rest of the buffer."""
        self._wait_for(None)
        self.transport.abort()

    def _update(self) -> None:
        """Determine what the connection waits for, and restart the timeout if that has changed.

        It may wait for the head or the body of a request, for the next request, or for the client
        to read.
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
        """Record what the connection waits for and start the timeout for it; None: nothing."""
        self._waits_for = what
        self._guard.waiting.pop(self, None)
        if what is not None:
            self._guard.waiting[self] = None
        self._start_timer(None if what is None else self._seconds[what])

    def _start_timer(self, seconds: float | None) -> None:
        """Restart the timeout; None: stop it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._timer = self.loop.call_later(seconds, self._give_up, seconds)

    def _give_up(self, seconds: float) -> None:
        """Close the connection, unless the client has read a part of the response meanwhile."""
        if 0 < self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._start_timer(seconds)
        else:
            self.close_now()


def widen_queue(listener: Any) -> None:
    """Let the system queue more new connections than asyncio accepts at a time.

    listener: a listening socket.
    """
    with socket.socket(fileno=os.dup(listener.fileno())) as same:
        same.listen(QUEUE)


def _free_descriptors() -> int:
    """Return how many files this process may still open; a large number if the limit is unknown."""
    with suppress(ImportError, OSError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            return limit - len(os.listdir("/dev/fd"))
    return 2**20


def _refusal(max_open: int) -> bytes:
    """Return the bytes of a 503 response."""
    error = APIError(
        503,
        f"{max_open} connections are busy, the most that this server keeps: try again soon",
        code="too_many_connections",
    )
    body = json.dumps(error.body).encode()
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: "
        b"%d\r\nRetry-After: 1\r\n"
        b"Connection: close\r\n\r\n%s" % (len(body), body)
    )
