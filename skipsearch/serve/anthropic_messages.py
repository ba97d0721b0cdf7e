"""Anthropic's Messages API (`/v1/messages`).

Source: the types of the package `anthropic` (`anthropic.types`).
"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from typing import Any

from skipsearch.serve.answer_parts import (
    AnswerPart,
    AnswerParts,
    Change,
    TranslatedAPI,
    encode_named_event,
    read_list,
    read_object,
    read_options,
    read_texts,
    refuse_fields,
)
from skipsearch.serve.api_errors import APIError
from skipsearch.serve.responses import ChoiceDelta, count_usage, summarise_decoding
from skipsearch.serve.service import ActiveRequest

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_REFUSED = {
    "mcp_servers": "this server calls no other server: leave it out",
    "container": "this server runs no code: leave it out",
}
_IGNORED = ("cache_control", "inference_geo", "diagnostics", "speed", "user_profile_id")
_DELTAS = {  # kind of a part → type of its deltas, and their field
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def error_body(error: APIError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _translate(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat request; see `TranslatedAPI`. Raises: APIError 400."""
    if data.get("max_tokens") is None:
        raise APIError(
            400, "the request lacks max_tokens", "max_tokens", "missing_required_parameter"
        )
    refuse_fields(data, _REFUSED)
    for name in (*_REFUSED, *_IGNORED):
        data.pop(name, None)
    messages: list[dict[str, Any]] = []
    system = data.pop("system", None)
    if system:
        content = read_texts(system, ("text",), "system", "system")
        messages.append({"role": "system", "content": content})
    for message in read_list(data.pop("messages", None), "messages"):
        _add_message(messages, read_object(message, "a message", "messages"))
    choice = read_options(data, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    thinking = read_options(data, "thinking", ("type", "budget_tokens", "display"))
    if thinking.get("type") not in (None, "enabled", "disabled", "adaptive", "between_tools"):
        raise APIError(
            400,
            f"thinking has the type {json.dumps(thinking['type'])[:60]}; it is enabled, "
            "disabled, adaptive or between_tools",
            "thinking",
        )
    if thinking.get("type") in ("enabled", "disabled"):  # else the template decides
        is_on = thinking["type"] == "enabled"
        variables = data.pop("chat_template_kwargs", None) or {}
        data["chat_template_kwargs"] = {"enable_thinking": is_on} | variables
    fields: dict[str, Any] = {
        "messages": messages,
        "stop": data.pop("stop_sequences", None),
        "tools": [_read_tool(tool) for tool in read_list(data.pop("tools", None), "tools")],
        "tool_choice": _read_choice(choice),
    }
    disabled = choice.get("disable_parallel_tool_use")
    if disabled is not None:
        fields["parallel_tool_calls"] = not disabled if isinstance(disabled, bool) else disabled
    config = read_options(data, "output_config", ("effort", "format"))
    if config.get("format") is not None:
        fields["response_format"] = config["format"]
    return fields | {"reasoning_effort": config.get("effort")}


def _translate_to_count(data: dict[str, Any]) -> dict[str, Any]:
    """Return `_translate` of a request to `/v1/messages/count_tokens`, which has no max_tokens."""
    data.setdefault("max_tokens", 1)
    return _translate(data)


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add one message to those of a chat. Raises: APIError 400.

    A message of the user may have results of tools, which are messages of their own in a chat.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        messages.append({"role": role, "content": content})
        return
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        block = read_object(block, "a block of a message", "messages")
        kind = block.get("type")
        if kind == "tool_result":
            result = block.get("content")
            answer = (
                "" if result is None else read_texts(result, ("text",), "a tool_result", "messages")
            )
            tool_call_id = block.get("tool_use_id")
            messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": answer})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(
                {"type": "text", "text": read_texts([block], ("text",), "a message", "messages")}
            )
    if texts or calls or role == "assistant":
        turn = {"role": role, "content": texts or ("" if not calls else None)}
        more = {"tool_calls": calls, "reasoning_content": "".join(thoughts)}
        messages.append(turn | {name: value for name, value in more.items() if value})


def _read_tool(tool: Any) -> dict[str, Any]:
    """Return a tool as chat requests have it. Raises: APIError 400 for a built-in tool."""
    tool = read_object(tool, "a tool", "tools")
    if tool.get("type") not in (None, "custom"):
        raise APIError(
            400,
            f"tools has the type {json.dumps(tool['type'])[:60]}, which this server does not have: "
            "it knows tools with an input_schema alone",
            "tools",
        )
    function = {
        name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _read_choice(choice: dict[str, Any]) -> Any:
    """Return `tool_choice` as chat requests have it. Raises: APIError 400."""
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice and kind not in tuple(_CHOICES):
        raise APIError(
            400,
            f"tool_choice has the type {json.dumps(kind)[:60]}; it is auto, any, none, or tool "
            "with the name of a tool",
            "tool_choice",
        )
    return _CHOICES.get(kind or "")


class MessageWriter:
    """Writes an answer as a message or as the events of its stream."""

    keep_alive = encode_named_event({"type": "ping"})

    def __init__(self, active: ActiveRequest, given: dict[str, Any]):
        """Make a writer. given: the fields of the request's body."""
        self.active, self.answer = active, AnswerParts()
        self._stops: list[str] = given.get("stop_sequences") or []
        self._tokens: list[int] = []
        self._id = f"msg_{secrets.token_hex(12)}"

    def begin(self) -> bytes:
        """Return the first events."""
        return encode_named_event({"type": "message_start", "message": self._message()}) + (
            self.keep_alive
        )

    def add(self, delta: ChoiceDelta) -> bytes:
        """Return the events for what a round has added."""
        if self._stops:
            self._tokens += delta.tokens
        return b"".join(_change(*change) for change in self.answer.feed(delta))

    def end(self) -> bytes:
        """Return the last events."""
        events = b"".join(_change(*change) for change in self.answer.close())
        reason, sequence = self._stop_reason()
        last = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(),
            "skipsearch": summarise_decoding(self.active.choices),
        }
        return events + encode_named_event(last) + encode_named_event({"type": "message_stop"})

    def fail(self, error: APIError) -> bytes:
        """Return the event of an error after the status 200 was sent."""
        return encode_named_event(error_body(error))

    def full_response(self) -> dict[str, Any]:
        """Return the message after `end`."""
        reason, sequence = self._stop_reason()
        return self._message() | {
            "stop_reason": reason,
            "stop_sequence": sequence,
            "skipsearch": summarise_decoding(self.active.choices),
        }

    def _message(self) -> dict[str, Any]:
        """Return the message as it is so far."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.active.service.name,
            "content": [_block(part, part.text) for part in self.answer.parts],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far. Anthropic counts cached tokens apart from the others."""
        usage = count_usage(self.active.choices, self.active.prompt_tokens)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return (reason, the stop sequence that ended the answer)."""
        reason = self.active.choices[0].finish_reason
        if reason == "length":
            return "max_tokens", None
        if reason == "tool_calls":
            return "tool_use", None
        text = self.active.service.tokenizer.decode(self._tokens) if self._stops else ""
        ends = [(text.index(stop), stop) for stop in self._stops if stop in text]
        return ("stop_sequence", min(ends)[1]) if ends else ("end_turn", None)


def _change(change: Change, part: AnswerPart, text: str) -> bytes:
    """Return the event of one change of the answer."""
    event: dict[str, Any] = {"type": "content_block_stop", "index": part.index}
    if change == "begin":
        event |= {"type": "content_block_start", "content_block": _block(part, "")}
    elif change == "add":
        kind, field = _DELTAS[part.kind]
        event |= {"type": "content_block_delta", "delta": {"type": kind, field: text}}
    return encode_named_event(event)


def _block(part: AnswerPart, text: str) -> dict[str, Any]:
    """Return a block of a message."""
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    try:
        arguments = json.loads(text)
    except ValueError:  # they begin, or max_tokens has cut them off
        arguments = {}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}


MESSAGES = TranslatedAPI(
    {
        "messages": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config",
        "parallel_tool_calls": "tool_choice",
    },
    _translate,
    MessageWriter,
)
MESSAGES_TO_COUNT = replace(MESSAGES, translate=_translate_to_count)
