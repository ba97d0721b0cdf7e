"""What other APIs than chat completions share: an answer as a list of parts, and the translation
of their requests into one to `/v1/chat/completions`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from skipsearch.serve.api_errors import APIError
from skipsearch.serve.protocol import ChatCompletionRequest, parse_request
from skipsearch.serve.responses import ChoiceDelta, encode
from skipsearch.serve.service import ActiveRequest

Change = Literal["begin", "add", "end"]
Kind = Literal["text", "reasoning", "call"]
_FOREIGN_FIELD = "foreign_field"
_CHAT_FIELDS = {"n", "logprobs", "top_logprobs"}  # fields that the other APIs do not have


@dataclass
class AnswerPart:
    """One part of an answer: text, thinking, or a call of a tool.

    name: of the tool. text: of a call, its arguments as JSON text.
    """

    index: int
    kind: Kind
    id: str
    name: str = ""
    text: str = ""


@dataclass
class AnswerParts:
    """The parts of an answer, as it grows. One part is open at a time."""

    parts: list[AnswerPart] = field(default_factory=list)
    _is_open: bool = False

    def feed(self, delta: ChoiceDelta) -> Iterator[tuple[Change, AnswerPart, str]]:
        """Add what a round has added; yield (change, part, text that was added)."""
        texts: tuple[tuple[Kind, str], ...] = (("reasoning", delta.reasoning), ("text", delta.text))
        for kind, text in texts:
            if text:
                if not (self._is_open and self.parts[-1].kind == kind):
                    yield from self._begin(kind)
                yield self._add(text)
        for call in delta.tool_calls:
            if "id" in call:
                yield from self._begin("call", call["id"], call["function"]["name"])
            if call["function"]["arguments"]:
                yield self._add(call["function"]["arguments"])

    def close(self) -> Iterator[tuple[Change, AnswerPart, str]]:
        """End the answer; yield as `feed` does. An empty answer gets an empty text."""
        if not self.parts:
            yield from self._begin("text")
        if self._is_open:
            self._is_open = False
            yield "end", self.parts[-1], ""

    def _begin(
        self, kind: Kind, call_id: str = "", name: str = ""
    ) -> Iterator[tuple[Change, AnswerPart, str]]:
        if self._is_open:
            yield "end", self.parts[-1], ""
        part = AnswerPart(len(self.parts), kind, call_id or secrets.token_hex(12), name)
        self.parts.append(part)
        self._is_open = True
        yield "begin", part, ""

    def _add(self, text: str) -> tuple[Change, AnswerPart, str]:
        self.parts[-1].text += text
        return "add", self.parts[-1], text


class AnswerWriter(Protocol):
    """Writes the answer to one request, in the form of an API. Events are encoded."""

    keep_alive: bytes  # an event that changes nothing

    def begin(self) -> bytes:
        """Return the first events."""
        ...

    def add(self, delta: ChoiceDelta) -> bytes:
        """Return the events for what a round has added."""
        ...

    def end(self) -> bytes:
        """Return the last events."""
        ...

    def fail(self, error: APIError) -> bytes:
        """Return the events of an error after the status 200 was sent."""
        ...

    def full_response(self) -> dict[str, Any]:
        """Return the response after `end`, for a request that does not stream."""
        ...


def encode_named_event(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event that has its type as its name, too."""
    return f"event: {data['type']}\n".encode() + b"data: " + encode(dict(data)) + b"\n\n"


def read_object(value: Any, name: str, field_name: str | None) -> dict[str, Any]:
    """Return `value` if it is an object. Raises: APIError 400 that calls it `name`."""
    if not isinstance(value, dict):
        raise APIError(400, f"{name} is {json.dumps(value)[:60]}; it is a JSON object", field_name)
    return value


def read_options(data: dict[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Remove the field `name`, an object, and return it; {} if it is left out.

    known: the fields that the object may have. Raises: APIError 400, for another that has a value,
    too.
    """
    value = data.pop(name, None)
    options = {} if value is None else read_object(value, name, name)
    unknown = next((k for k, v in options.items() if v is not None and k not in known), None)
    if unknown is not None:
        raise APIError(
            400,
            f"{name}.{unknown[:80]} is no field of this request that the server knows: leave it "
            "out",
            name,
        )
    return options


def read_list(value: Any, name: str) -> list[Any]:
    """Return the field `name` if it is a list; an empty list for None. Raises: APIError 400."""
    if not isinstance(value, list | None):
        raise APIError(400, f"{name} is {json.dumps(value)[:60]}; it is a list", name)
    return value or []


def read_texts(parts: Any, kinds: tuple[str, ...], where: str, field_name: str) -> str:
    """Return a content, which is a text or a list of parts of these types, as one text.

    where: what has the content, for errors. Raises: APIError 400 that names the type.
    """
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise APIError(
            400,
            f"{where} has {json.dumps(parts)[:60]} as its content; give a text or a list of parts",
            field_name,
        )
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
        if not isinstance(text, str):
            raise APIError(
                400,
                f"{where} has a part of the type {json.dumps(kind)[:60]}; this server reads text "
                f"alone ({', '.join(kinds)})",
                field_name,
            )
        texts.append(text)
    return "".join(texts)


def refuse_fields(data: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise APIError 400 for a field that has a value although the server cannot carry it out."""
    for name, reason in reasons.items():
        if data.get(name) not in (None, False, [], {}):
            raise APIError(400, f"{name} is set; {reason}", name)


@dataclass(frozen=True)
class TranslatedAPI:
    """An API whose requests are translated into requests to `/v1/chat/completions`.

    names: fields of a chat request → the field that they are made of.
    translate: removes the fields that it reads from a request and returns fields of a chat request.
        The fields that it leaves are passed on.
    make_writer: makes the writer of an answer, from the active request and the fields of the body.
    """

    names: Mapping[str, str]
    translate: Callable[[dict[str, Any]], dict[str, Any]]
    make_writer: Callable[[ActiveRequest, dict[str, Any]], AnswerWriter]

    def read_request(self, body: bytes) -> tuple[ChatCompletionRequest, dict[str, Any]]:
        """Return (chat request, fields of the body). Raises: APIError 400."""
        given: dict[str, Any] = {}

        def to_chat(data: Any) -> dict[str, Any]:
            given.update(read_object(data, "the body", None))
            rest = dict(given)
            fields = self.translate(rest)
            own_names = {chat for chat, name in self.names.items() if chat != name}
            foreign = next((name for name in rest if name in own_names | _CHAT_FIELDS), None)
            if foreign is not None:
                raise APIError(
                    400,
                    f"{foreign} is no field of this request: leave it out",
                    foreign,
                    _FOREIGN_FIELD,
                )
            return rest | fields

        return parse_request(ChatCompletionRequest, body, to_chat), given

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Give errors within the context the names of this API's fields."""
        try:
            yield
        except APIError as error:
            if error.code == _FOREIGN_FIELD:
                raise
            message = error.message
            for chat_name, name in self.names.items():
                message = re.sub(rf"\b{chat_name}\b", name, message)
            param = self.names.get(error.param or "", error.param)
            raise APIError(error.status, message, param, error.code, error.headers) from None
