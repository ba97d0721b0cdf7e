"""Run the server until SIGTERM or Ctrl-C. It then accepts no more requests and finishes those that
it has.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from skipsearch.decoding import Decoder
from skipsearch.errors import SkipSearchError
from skipsearch.serve.auth import APIKeys
from skipsearch.serve.limits import Limits

MAX_HEADER_BYTES = 65536  # of one request; more are rejected before they are parsed


def require_serve_extra() -> None:
    """Raise SkipSearchError if a library of `skipsearch[serve]` is missing."""
    missing = next(
        (name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None),
        None,
    )
    if missing is not None:
        raise SkipSearchError(
            f"serving needs {missing}, which is not installed: pip install 'skipsearch[serve]'"
        )


def run_server(
    decoder: Decoder,
    host: str,
    port: int,
    limits: Limits,
    served_model_name: str | None = None,
    alias: str | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
    cors_origins: Sequence[str] = (),
    sampling_defaults: Mapping[str, Any] | None = None,
    log_prompts: Path | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Run the server; blocks until it ends.

    port: 0 for any free port.
    alias: a second name that clients may use for the model.
    on_ready: called with the server's address when it accepts requests.
    cors_origins: sites whose pages may call the server from a browser.
    sampling_defaults: values of fields that a request does not name.
    log_prompts: a file that each prompt is appended to, for `tune`. warn: called with what the user
        should know while the server runs.

    Raises: SkipSearchError if the address cannot be used or a library of `skipsearch[serve]` is
        missing; ModelError if the model cannot be served.
    """
    require_serve_extra()
    import uvicorn

    from skipsearch.serve.app import build_app
    from skipsearch.serve.connections import ACCEPT_BATCH, Connections, widen_queue
    from skipsearch.serve.prompt_log import PromptLog
    from skipsearch.serve.service import Service

    keys = APIKeys.from_environment()
    prompt_log = None
    if log_prompts is not None:
        prompt_log = PromptLog(log_prompts, decoder.model.tokenizer, warn)
    service = Service(
        decoder, keys, limits, served_model_name, alias, sampling_defaults, prompt_log
    )
    app = build_app(service, local_only=is_loopback(host), cors_origins=cors_origins)
    connections = Connections(limits, on_refusal=lambda: service.metrics.record_refusal(503))
    # log_level: uvicorn warns of each request that is not HTTP, so clients could fill the disk.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="error",
        access_log=False,
        loop="asyncio",
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=ceil(limits.idle_s),
        backlog=ACCEPT_BATCH,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: object = None) -> None:
            asyncio.get_running_loop().set_exception_handler(connections.handle_error)
            await super().startup(sockets)  # type: ignore[arg-type]
            if self.started and self.servers:
                for listener in self.servers[0].sockets:
                    widen_queue(listener)
                address, port = self.servers[0].sockets[0].getsockname()[:2]
                on_ready(f"http://{f'[{address}]' if ':' in address else address}:{port}")

    server = Server(config)
    try:
        server.run()
    except UnicodeError:  # such a name cannot be encoded for DNS
        raise SkipSearchError(
            f"{host!r} is no name of a host: give an address of this machine, such as 127.0.0.1"
        ) from None
    except SystemExit:  # uvicorn has logged why
        raise SkipSearchError(
            f"the server cannot listen at {host} port {port}: choose another --port, or end what "
            "listens there"
        ) from None
    if not server.started:
        raise SkipSearchError(
            f"the server cannot listen at {host} port {port}: choose another --port, or end what "
            "listens there"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
