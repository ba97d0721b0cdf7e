"""A server in a thread of the test's own process, for clients that speak HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from skipsearch.serve.app import build_app
from skipsearch.serve.service import Service


@contextmanager
def served(service: Service) -> Iterator[str]:
    """Serve within the context; yields the address of the API."""
    server = uvicorn.Server(uvicorn.Config(build_app(service), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()
