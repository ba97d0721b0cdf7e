"""Serve until SIGTERM or Ctrl-C: what runs then, and what waits, is finished; nothing more is taken."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from importlib.util import find_spec

from skipsearch.decoding import Decoder
from skipsearch.errors import SkipSearchError
from skipsearch.serve.keys import Keys
from skipsearch.serve.limits import Limits

HEADER_BYTES = 65536   # of one request; more are answered with an error before anything is made of them


def check_installed() -> None:
    """Raises: SkipSearchError where a library of `skipsearch[serve]` is missing."""
    missing = next((name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None), None)
    if missing is not None:
        raise SkipSearchError(f"serving needs {missing}, which is not installed: pip install 'skipsearch[serve]'")


def serve(decoder: Decoder, host: str, port: int, limits: Limits, name: str | None = None,
          ready: Callable[[str], None] = lambda address: None) -> None:
    """Blocks. port 0: any free one. ready: told the address when it may be asked.

    Raises: SkipSearchError where the address cannot be used, or a library of `skipsearch[serve]` is missing; ModelError.
    """
    check_installed()
    import uvicorn

    from skipsearch.serve.app import build_app
    from skipsearch.serve.service import Service

    service = Service(decoder, Keys.from_environment(), limits, name)
    app = build_app(service, local_only=is_loopback(host))
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, http="h11", ws="none", lifespan="on",
                            server_header=False, h11_max_incomplete_event_size=HEADER_BYTES, timeout_keep_alive=30, backlog=512)

    class Server(uvicorn.Server):
        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets)  # type: ignore[arg-type]
            if self.started and self.servers:
                there = self.servers[0].sockets[0].getsockname()
                ready(f"http://{f'[{there[0]}]' if ':' in there[0] else there[0]}:{there[1]}")

    server = Server(config)
    try:
        server.run()
    except SystemExit:   # uvicorn has said why
        raise SkipSearchError(f"the server cannot listen at {host} port {port}: choose another --port, or end what listens there") from None
    if not server.started:
        raise SkipSearchError(f"the server cannot listen at {host} port {port}: choose another --port, or end what listens there")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
