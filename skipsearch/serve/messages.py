"""The messages of a conversation, and the base of all parts of a request."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from skipsearch.serve.api_errors import APIError
from skipsearch.serve.tools import Turn, read_calls

T = TypeVar("T")
# Validation of a list stops at its first wrong entry. A body of 2 MB may hold a million of them,
# and the error of each takes a kilobyte.
FastList = Annotated[list[T], Field(fail_fast=True)]
Text = Annotated[str, Field(strict=True)]

IGNORED_MESSAGE_FIELDS = frozenset({"annotations", "cache_control", "id", "name"})


class RequestPart(BaseModel):
    """The base of all parts of a request body.

    An unknown field is rejected with a 400 that names it (the first one only).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    inside: ClassVar[str | None] = None  # the field of the request that contains this part

    @model_validator(mode="before")
    @classmethod
    def _known_fields_alone(cls, data: Any) -> Any:
        """Raise APIError 400 for an unknown field."""
        if isinstance(data, dict) and cls.model_config.get("extra") == "forbid":
            unknown = next((name for name in data if name not in cls.model_fields), None)
            if unknown is not None:
                name = ".".join(filter(None, (cls.inside, unknown[:80])))
                raise APIError(
                    400,
                    f"{name} is no field of this request that the server knows: leave it out",
                    cls.inside or name,
                )
        return data


class TextPart(RequestPart):
    """A part of a message's content."""

    inside = "messages"
    type: Literal["text"]
    text: Text
    cache_control: Any = None  # is ignored

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, data: Any) -> Any:
        """Raise APIError 400 for a part that is no text, before its fields are looked at."""
        kind = data.get("type") if isinstance(data, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            raise APIError(
                400,
                f"a message has a part of the type {json.dumps(kind)[:60]}; this server reads text "
                "alone",
                "messages",
            )
        return data


class Message(RequestPart):
    """One message of a conversation.

    Clients also send other fields in messages of the assistant. They are ignored if they are null
    or empty, or if they change no token.
    tool_calls: the calls that the assistant made; its content may then be null.
    reasoning_content, reasoning: the assistant's thinking, for templates that render it.
    tool_call_id: the call that a message of a tool answers, for templates that render it. Other
        templates rely on the order of the messages.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    role: Annotated[str, Field(min_length=1, max_length=64, strict=True)]
    content: (
        Annotated[
            Annotated[Text, Tag("<text>")] | Annotated[FastList[TextPart], Tag("<parts>")],
            Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
        ]
        | None
    ) = None
    tool_calls: list[Any] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Message:
        """Raise APIError 400 for an unsupported field, and for a message without content."""
        unsupported = next(
            (
                name
                for name, value in (self.model_extra or {}).items()
                if value not in (None, [], "") and name not in IGNORED_MESSAGE_FIELDS
            ),
            None,
        )
        if unsupported is not None:
            raise APIError(
                400,
                f"a message has {unsupported!r}, which this server does not carry out: "
                "leave it out",
                "messages",
            )
        if self.content is None and not self.tool_calls and not self._thought:
            raise APIError(400, f"a message of the {self.role} has no content", "messages")
        return self

    @property
    def _thought(self) -> str | None:
        """The thinking of a message of the assistant."""
        return (self.reasoning_content or self.reasoning) if self.role == "assistant" else None

    @property
    def turn(self) -> Turn:
        """The message as chat templates take it. Raises: APIError 400."""
        text = (
            "".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content
        )
        turn: Turn = {"role": self.role, "content": text}
        if self.tool_calls:
            turn["tool_calls"] = read_calls(self.tool_calls)
        if self._thought:
            turn |= {"content": text or "", "reasoning_content": self._thought}
            if self.tool_calls and not text:  # the template of gpt-oss takes one of the two
                turn["thinking"] = self._thought
        if self.role == "tool":
            more = {"tool_call_id": self.tool_call_id, "name": (self.model_extra or {}).get("name")}
            turn |= {name: value for name, value in more.items() if isinstance(value, str)}
        return turn
