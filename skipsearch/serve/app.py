"""The routes of the server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from skipsearch.serve.answers import DONE, KEEP_ALIVE, event, figures, usage
from skipsearch.serve.asked import ChatAsked, CompletionAsked, parse
from skipsearch.serve.faults import Fault
from skipsearch.serve.page import page_response
from skipsearch.serve.service import Asking, Service

PATIENCE = 10.0   # seconds without an event, after which a streaming client is told that all is well
LOCAL = {"localhost", "127.0.0.1", "[::1]"}


def build_app(service: Service, local_only: bool = False) -> FastAPI:
    """The application. local_only: answer only where the address that was asked for is this machine's own, so that no page of another site
    can reach the server by a name that it lets point here."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.desk.start()
        yield
        await asyncio.to_thread(service.desk.close)

    app = FastAPI(title="skipsearch", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    if local_only:
        app.add_middleware(_LocalHosts, service=service)

    @app.exception_handler(Fault)
    async def fault(_: Request, error: Fault) -> Response:
        return _refusal(service, error)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        words = {404: "there is nothing at this address", 405: "this address does not take that method"}
        return _refusal(service, Fault(error.status_code, words.get(error.status_code, str(error.detail)), headers=error.headers))

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: ClientDisconnect) -> Response:
        return _refusal(service, Fault(499, "the client went away"))

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return _refusal(service, Fault(500, "the server failed at this request, which is its own fault: report it", code="internal"))

    @app.get("/health")
    async def health() -> Response:
        running, waiting = service.desk.counts
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> Response:
        return page_response()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        service.keys.owner(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        service.keys.owner(request.headers.get("authorization"))
        if name != service.name:
            raise Fault(404, f"there is no model {name[:80]!r} here; this server has {service.name!r}", "model", "model_not_found")
        return JSONResponse(_model(service))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionAsked)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatAsked)

    return app


class _LocalHosts:
    """Refuses requests that were sent to another name."""

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if re.sub(r":\d*$", "", host) not in LOCAL:
                fault = Fault(421, "this server answers to localhost and 127.0.0.1 alone", code="wrong_host")
                await _refusal(self.service, fault)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _model(service: Service) -> dict[str, Any]:
    spec, recipe = service.model.spec, service.desk.decoder.recipe
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "skipsearch", "max_model_len": spec.context,
            "skipsearch": {"recipe": str(recipe), "drafters": [drafter.kind for drafter in recipe.drafters], "engine": spec.engine,
                           "dtype": spec.dtype_name, "chat": service.is_chat}}


def _refusal(service: Service, fault: Fault) -> Response:
    service.metrics.refused(fault.status)
    return JSONResponse(fault.body, fault.status, headers=fault.headers)


async def _answer(service: Service, request: Request, kind: type[CompletionAsked | ChatAsked]) -> Response:
    key = service.keys.owner(request.headers.get("authorization"))
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":   # what a page of another site can send without asking first is refused
        raise Fault(415, f"the content type is {media[:60]!r}; send application/json", code="wrong_content_type")
    asked = parse(kind, await _body(service, request))
    asking = await service.ask(asked, key)
    if asked.stream:
        return StreamingResponse(_events(asking), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    return JSONResponse(await _whole(asking, request))


async def _body(service: Service, request: Request) -> bytes:
    """Raises: Fault for one that is too large or does not arrive."""
    most = service.limits.body
    too_large = Fault(413, f"the body is larger than {most} bytes, which is the most that this server reads", code="body_too_large",
                      headers={"Connection": "close"})
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(service.limits.reading):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Fault(408, f"the body did not arrive within {service.limits.reading:g} s", code="body_too_slow",
                    headers={"Connection": "close"}) from None
    return bytes(body)


async def _whole(asking: Asking, request: Request) -> dict[str, Any]:
    """The whole answer, unless the client goes away before it is there."""
    async def read() -> None:
        async for _ in asking.added():
            continue

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    reading, leaving = asyncio.ensure_future(read()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise Fault(499, "the client went away")
        reading.result()
    finally:
        leaving.cancel()
        reading.cancel()
        asking.abandon()
    return asking.envelope.whole(asking.choices, asking.prompt_tokens)


async def _events(asking: Asking) -> AsyncIterator[bytes]:
    """The answers as server-sent events. A client that goes away cancels this, and with it the jobs."""
    envelope, asked = asking.envelope, asking.asked
    try:
        if envelope.chat:
            for choice in asking.choices:
                yield event(envelope.opening(choice.index))
        try:
            async for added in asking.added(PATIENCE):
                if added is None:
                    yield KEEP_ALIVE
                    continue
                more = {"skipsearch": added.trace()} if asked.skipsearch.trace else {}
                so_far = {"usage": usage(asking.choices, asking.prompt_tokens)} if asked.usage_in_each else {}
                finish = added.choice.finish
                if added.text or added.scores or finish or more:
                    yield event(envelope.streamed(added, finish, **more, **so_far))
        except Fault as error:   # the status is sent already
            yield event(error.body)
            return
        if asked.skipsearch.trace:
            yield event(envelope.around([], True, skipsearch={"figures": figures(asking.choices)}))
        if asked.include_usage:
            yield event(envelope.around([], True, usage=usage(asking.choices, asking.prompt_tokens)))
        yield DONE
    finally:
        asking.abandon()
