"""The routes of the server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import skipsearch
from skipsearch.serve.answer_parts import AnswerWriter, TranslatedAPI
from skipsearch.serve.anthropic_messages import MESSAGES, MESSAGES_TO_COUNT, error_body
from skipsearch.serve.api_errors import APIError, to_api_error
from skipsearch.serve.model_facts import (
    DetokenizeRequest,
    TokenizeRequest,
    describe_server,
    detokenize,
    list_tags,
    tokenize,
)
from skipsearch.serve.openai_responses import RESPONSES
from skipsearch.serve.page import page_response
from skipsearch.serve.protocol import ChatCompletionRequest, CompletionRequest, parse_request
from skipsearch.serve.responses import (
    DONE,
    KEEP_ALIVE_EVENT,
    ChoiceDelta,
    count_usage,
    encode,
    encode_event,
    report_drafting,
    summarise_decoding,
)
from skipsearch.serve.service import ActiveRequest, Service

KEEP_ALIVE_S = 10.0  # seconds without an event, after which a stream gets a comment
SMALL_BODY = 65536  # bytes; a larger body is parsed in a thread, to keep the event loop free
T = TypeVar("T")
LOCAL_NAMES = {"localhost", "127.0.0.1", "[::1]"}


def build_app(
    service: Service, local_only: bool = False, cors_origins: Sequence[str] = ()
) -> FastAPI:
    """Build the application.

    local_only: reject requests whose Host header is not a name of this machine. So a page of
        another site cannot reach the server by a host name that resolves to it (DNS rebinding).
    cors_origins: sites whose pages may call the server from a browser.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        await asyncio.to_thread(service.scheduler.close)

    app = FastAPI(
        title="skipsearch", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )

    app.add_middleware(_FailuresAnswered, service=service)
    if cors_origins:
        # Preflights are answered without a key. The server uses no cookies, so it allows none.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(_HeadersChecked, service=service, local_only=local_only)

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> Response:
        return _error_response(service, error, request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        words = {
            404: "there is nothing at this address",
            405: "this address does not take that method",
        }
        return _error_response(
            service,
            APIError(
                error.status_code,
                words.get(error.status_code, str(error.detail)),
                headers=error.headers,
            ),
            request.url.path,
        )

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return _error_response(service, APIError(499, "the client went away"), request.url.path)

    @app.get("/health")
    async def health() -> Response:
        running, waiting = service.scheduler.queue_sizes
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> Response:
        return page_response()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        service.keys.authenticate(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [_model_entry(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        service.keys.authenticate(request.headers.get("authorization"))
        service.check_name(name)
        return JSONResponse(_model_entry(service))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatCompletionRequest)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await _answer_translated(service, request, RESPONSES)

    @app.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"])
    async def stored_responses(rest: str) -> Response:
        raise APIError(
            404,
            "this server stores no responses: send the whole conversation to /v1/responses",
            code="no_stored_responses",
        )

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await _answer_translated(service, request, MESSAGES)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = (await _read_request(service, request))[0]
        with MESSAGES.naming_errors():
            chat_request, _ = await _parse(body, MESSAGES_TO_COUNT.read_request)
            prompts = await service.tokenize_prompts(chat_request)
        return JSONResponse({"input_tokens": sum(len(prompt.ids) for prompt in prompts)})

    @app.post("/tokenize")
    async def tokens_of(request: Request) -> Response:
        body, _ = await _read_request(service, request)
        parsed = await _parse(body, partial(parse_request, TokenizeRequest))
        return JSONResponse(await asyncio.to_thread(tokenize, service, parsed))

    @app.post("/detokenize")
    async def text_of(request: Request) -> Response:
        body, _ = await _read_request(service, request)
        parsed = await _parse(body, partial(parse_request, DetokenizeRequest))
        return JSONResponse(await asyncio.to_thread(detokenize, service, parsed))

    @app.get("/props")
    async def props(request: Request) -> Response:
        service.keys.authenticate(_authorization(request))
        return JSONResponse(describe_server(service))

    @app.get("/api/tags")
    async def tags(request: Request) -> Response:
        service.keys.authenticate(_authorization(request))
        return JSONResponse(list_tags(service))

    @app.get("/api/version")
    async def version() -> Response:
        return JSONResponse({"version": skipsearch.__version__})

    for route in app.routes:
        methods = route.methods if isinstance(route, APIRoute) else None
        if methods and "GET" in methods:
            methods.add("HEAD")  # probes and proxies ask so; the server leaves the body out
    return app


class _FailuresAnswered:
    """Middleware that answers a request at which the server fails.

    An error that reached uvicorn would close the connection and fill the log.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception as error:
            failure = to_api_error(error)
            if (
                not has_begun
            ):  # else uvicorn closes the connection, which shows that text is missing
                response = _error_response(self.service, failure, scope["path"])
                await response(scope, receive, send)


class _HeadersChecked:
    """Middleware that rejects requests whose headers may mislead.

    local_only: reject a Host header that is not a local name.
    """

    def __init__(self, app: ASGIApp, service: Service, local_only: bool):
        self.app, self.service, self.local_only = app, service, local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(Headers(scope=scope)) if scope["type"] == "http" else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            await _error_response(self.service, error, scope["path"])(scope, receive, send)

    def _check(self, headers: Headers) -> APIError | None:
        """Return the error with which a request is rejected; None for one that is not."""
        host = headers.get("host")
        # A browser always names a host. A probe by HTTP/1.0 may name none.
        is_local = host is None or re.sub(r":\d*$", "", host).lower() in LOCAL_NAMES
        if self.local_only and not is_local:
            return APIError(
                421, "this server answers to localhost and 127.0.0.1 alone", code="wrong_host"
            )
        # A proxy may read one of them and this server the other: then a body hides a request.
        if "content-length" in headers and "transfer-encoding" in headers:
            return APIError(
                400,
                "the request has both Content-Length and Transfer-Encoding, so its body has two "
                "ends: send one of them",
                code="ambiguous_body",
                headers={"Connection": "close"},
            )
        return None


def _model_entry(service: Service) -> dict[str, Any]:
    """Return the entry of the model in `/v1/models`."""
    spec, recipe = service.model.spec, service.scheduler.decoder.recipe
    return {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "skipsearch",
        "max_model_len": spec.context_length,
        "skipsearch": {
            "recipe": str(recipe),
            "drafters": [drafter.kind for drafter in recipe.drafters],
            "engine": spec.engine,
            "dtype": spec.dtype_name,
            "chat": service.is_chat,
        },
    }


def _error_response(service: Service, error: APIError, path: str = "") -> Response:
    """Count an error and return its response.

    path: of the request. The Messages API has errors of its own form.
    """
    service.metrics.record_refusal(error.status)
    body = error_body(error) if path.startswith("/v1/messages") else error.body
    return Response(encode(body), error.status, error.headers, "application/json")


async def _answer(
    service: Service, request: Request, kind: type[CompletionRequest | ChatCompletionRequest]
) -> Response:
    """Check a request, submit it, and return its response or its stream."""
    body, key = await _read_request(service, request)
    http_request = await _parse(body, partial(parse_request, kind))
    active = await service.submit(http_request, key)
    if http_request.stream:
        return _event_stream(_stream_response(active))
    await _wait_for_answer(active, request)
    full = active.responses.full_response(active.choices, active.prompt_tokens)
    return Response(encode(full), media_type="application/json")


async def _answer_translated(service: Service, request: Request, api: TranslatedAPI) -> Response:
    """Check a request of another API, submit it, and return its response or its stream."""
    body, key = await _read_request(service, request)
    with api.naming_errors():
        chat_request, given = await _parse(body, api.read_request)
        active = await service.submit(chat_request, key)
    writer = api.make_writer(active, given)
    if chat_request.stream:
        return _event_stream(_stream_parts(active, writer))
    await _wait_for_answer(active, request, writer.add)
    writer.end()
    return Response(encode(writer.full_response()), media_type="application/json")


async def _parse(body: bytes, read: Callable[[bytes], T]) -> T:
    """Parse a body; a large one in a thread."""
    return read(body) if len(body) <= SMALL_BODY else await asyncio.to_thread(read, body)


def _event_stream(events: AsyncIterator[bytes]) -> Response:
    """Return a response of server-sent events."""
    return StreamingResponse(
        events,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _read_request(service: Service, request: Request) -> tuple[bytes, str]:
    """Return (body, name of the key's owner). Raises: APIError."""
    key = service.keys.authenticate(_authorization(request))
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if (
        media != "application/json"
    ):  # other types may come from a page of another site, without a CORS preflight
        raise APIError(
            415,
            f"the content type is {media[:60]!r}; send application/json",
            code="wrong_content_type",
        )
    return await _read_body(service, request), key


def _authorization(request: Request) -> str | None:
    """Return the header with the key; clients of the Messages API send `x-api-key` instead."""
    headers = request.headers
    if "authorization" not in headers and "x-api-key" in headers:
        return f"Bearer {headers['x-api-key']}"
    return headers.get("authorization")


async def _read_body(service: Service, request: Request) -> bytes:
    """Read the body of a request.

    Raises: APIError if it is too large or does not arrive in time.
    """
    most = service.limits.max_body_bytes
    too_large = APIError(
        413,
        f"the body is larger than {most} bytes, which is the most that this server reads",
        code="body_too_large",
        headers={"Connection": "close"},
    )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(service.limits.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise APIError(
            408,
            f"the body did not arrive within {service.limits.body_timeout_s:g} s",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from None
    return bytes(body)


async def _wait_for_answer(
    active: ActiveRequest,
    request: Request,
    on_delta: Callable[[ChoiceDelta], object] = lambda delta: None,
) -> None:
    """Wait for all rounds. on_delta: called with what each round has added.

    Raises: APIError if the client disconnects before that.
    """

    async def read() -> None:
        async for delta in active.deltas():
            if delta is not None:
                on_delta(delta)

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    reading, leaving = asyncio.ensure_future(read()), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise APIError(499, "the client went away")
        reading.result()
    finally:
        leaving.cancel()
        reading.cancel()
        active.cancel()


async def _stream_parts(active: ActiveRequest, writer: AnswerWriter) -> AsyncIterator[bytes]:
    """Yield the answer to a request of another API as server-sent events; as `_stream_response`."""
    try:
        yield writer.begin()
        try:
            async for delta in active.deltas(KEEP_ALIVE_S):
                if events := writer.keep_alive if delta is None else writer.add(delta):
                    yield events
        except Exception as error:  # too late for an HTTP status: 200 was sent
            yield writer.fail(to_api_error(error))
            return
        yield writer.end()
    finally:
        active.cancel()


async def _stream_response(active: ActiveRequest) -> AsyncIterator[bytes]:
    """Yield the response as server-sent events.

    If the client disconnects, the server cancels this generator, which cancels the jobs.
    """
    envelope, http_request = active.responses, active.request
    try:
        if envelope.chat:
            for choice in active.choices:
                yield encode_event(envelope.opening_chunk(choice.index))
        try:
            async for delta in active.deltas(KEEP_ALIVE_S):
                if delta is None:
                    yield KEEP_ALIVE_EVENT
                    continue
                more = {"skipsearch": delta.trace_round()} if http_request.skipsearch.trace else {}
                so_far = (
                    {"usage": count_usage(active.choices, active.prompt_tokens)}
                    if http_request.continuous_usage
                    else {}
                )
                finish = delta.choice.finish_reason
                has_text = delta.text or delta.reasoning or delta.tool_calls
                if has_text or delta.scores or finish or more:
                    yield encode_event(envelope.delta_chunk(delta, finish, **more, **so_far))
        except Exception as error:  # too late for an HTTP status: 200 was sent
            yield encode_event(to_api_error(error).body)
            return
        if http_request.skipsearch.trace:
            yield encode_event(
                envelope.wrap([], True, skipsearch={"figures": summarise_decoding(active.choices)})
            )
        if http_request.include_usage:
            usage = count_usage(active.choices, active.prompt_tokens)
            drafting = report_drafting(active.choices, active.prompt_tokens)
            figures = summarise_decoding(active.choices)
            last = envelope.wrap([], True, usage=usage, skipsearch=figures, **drafting)
            yield encode_event(last)
        yield DONE
    finally:
        active.cancel()
