"""OpenAI's Responses API (`/v1/responses`), without state: a request has the whole conversation.

Source: the types of the package `openai` (`openai.types.responses`).
"""

from __future__ import annotations

import json
import secrets
from time import time
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
from skipsearch.serve.responses import (
    KEEP_ALIVE_EVENT,
    ChoiceDelta,
    count_usage,
    summarise_decoding,
)
from skipsearch.serve.service import ActiveRequest

_NOT_STORED = "this server stores no responses: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "prompt": "this server stores no prompts: send instructions and input",
    "background": "this server answers at once: leave it out",
    "top_logprobs": "use /v1/chat/completions for log-probabilities",
}
# What a request may ask to include although it changes nothing here.
_INCLUDED = ("reasoning.encrypted_content",)
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def _translate(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat request; see `TranslatedAPI`. Raises: APIError 400."""
    refuse_fields(data, _REFUSED)
    _check_neutral(data)
    for name in (*_REFUSED, "include", "truncation", "max_tool_calls"):
        data.pop(name, None)
    if data.get("input") is None:
        raise APIError(400, "the request lacks input", "input", "missing_required_parameter")
    instructions, given = data.pop("instructions", None), data.pop("input")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in read_list(given, "input"):
            _add_item(messages, read_object(item, "an item of input", "input"))
    fields: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": data.pop("max_output_tokens", None),
        "tools": [_read_tool(tool) for tool in read_list(data.pop("tools", None), "tools")],
        "tool_choice": _read_choice(data.pop("tool_choice", None)),
    }
    text = read_options(data, "text", ("format", "verbosity"))
    if text.get("format") is not None:
        fields["response_format"] = _read_format(read_object(text["format"], "its format", "text"))
    reasoning = read_options(data, "reasoning", ("effort", "summary", "generate_summary"))
    return fields | {
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
    }


def _check_neutral(data: dict[str, Any]) -> None:
    """Raise APIError 400 for a value that is not supported."""
    if data.get("truncation") not in (None, "disabled"):
        raise APIError(
            400,
            f"truncation is {json.dumps(data['truncation'])[:60]}; this server drops no part of a "
            "conversation: leave it out",
            "truncation",
        )
    unknown = [name for name in read_list(data.get("include"), "include") if name not in _INCLUDED]
    if unknown:
        raise APIError(
            400,
            f"include has {json.dumps(unknown[0])[:60]}, which this server does not have: leave it "
            "out",
            "include",
        )


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add one item of `input` to the messages of a chat. Raises: APIError 400."""
    kind = item.get("type", "message")
    if kind == "message":
        content = read_texts(item.get("content"), _TEXT_PARTS, "a message of input", "input")
        if item.get("role") != "assistant" or not _is_thought(messages):
            messages.append({"role": item.get("role")})
        messages[-1]["content"] = content
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = read_texts(item.get("output"), _TEXT_PARTS, "a function_call_output", "input")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        if item.get("content"):
            thought = read_texts(item["content"], ("reasoning_text",), "a reasoning item", "input")
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    else:
        raise APIError(
            400,
            f"input has an item of the type {json.dumps(kind)[:60]}; this server reads message, "
            "function_call, function_call_output and reasoning",
            "input",
        )


def _is_thought(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is the thinking before an answer that follows."""
    return bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}


def _read_tool(tool: Any) -> dict[str, Any]:
    """Return a tool as chat requests have it. Raises: APIError 400 for a built-in tool."""
    tool = read_object(tool, "a tool", "tools")
    if tool.get("type") != "function":
        raise APIError(
            400,
            f"tools has the type {json.dumps(tool.get('type'))[:60]}, which this server does not "
            "have: it knows function alone",
            "tools",
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _read_choice(choice: Any) -> Any:
    """Return `tool_choice` as chat requests have it. Raises: APIError 400."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise APIError(
            400,
            f"tool_choice has the type {json.dumps(choice.get('type'))[:60]}; it is auto, none, "
            "required, or the type function with the name of a tool",
            "tool_choice",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _read_format(form: dict[str, Any]) -> dict[str, Any]:
    """Return `text.format` as `response_format`."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


class ResponseWriter:
    """Writes an answer as a response or as the events of its stream."""

    keep_alive = KEEP_ALIVE_EVENT

    def __init__(self, active: ActiveRequest, given: dict[str, Any]):
        """Make a writer. given: the fields of the request's body."""
        self.active, self.answer, self._n_events = active, AnswerParts(), 0
        request = active.request
        self._shared: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time()),
            "background": False,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata") or {},
            "model": active.service.name,
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.sampling_options["temperature"],
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": [
                {"parameters": None, "strict": None} | tool for tool in given.get("tools") or []
            ],
            "top_p": request.sampling_options["top_p"],
            "truncation": "disabled",
        }

    def begin(self) -> bytes:
        """Return the first events."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def add(self, delta: ChoiceDelta) -> bytes:
        """Return the events for what a round has added."""
        return b"".join(self._change(*change) for change in self.answer.feed(delta))

    def end(self) -> bytes:
        """Return the last events."""
        events = b"".join(self._change(*change) for change in self.answer.close())
        response = self.full_response()
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: APIError) -> bytes:
        """Return the event of an error after the status 200 was sent."""
        reason = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=reason))

    def full_response(self) -> dict[str, Any]:
        """Return the response after `end`."""
        is_cut = self.active.choices[0].finish_reason == "length"
        usage = count_usage(self.active.choices, self.active.prompt_tokens)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage["total_tokens"],
            },
            skipsearch=summarise_decoding(self.active.choices),
        )

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """Return the response as it is so far."""
        parts = self.answer.parts
        output = [self._item(part, "completed") for part in parts[:-1]]
        output += [self._item(part, self._end_status()) for part in parts[-1:]]
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return self._shared | {"status": status, "output": output} | nothing | more

    def _end_status(self) -> str:
        """Return the status of the part that ends now."""
        is_cut = self.active.choices[0].finish_reason == "length"
        return "incomplete" if is_cut else "completed"

    def _item(self, part: AnswerPart, status: str) -> dict[str, Any]:
        """Return an item of `output`."""
        if part.kind == "call":
            return {
                "id": f"fc_{part.id}",
                "type": "function_call",
                "status": status,
                "call_id": part.id,
                "name": part.name,
                "arguments": part.text,
            }
        content = [] if status == "in_progress" else [_content(part, part.text)]
        if part.kind == "reasoning":
            return {
                "id": f"rs_{part.id}",
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": content,
            }
        return {
            "id": f"msg_{part.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _change(self, change: Change, part: AnswerPart, text: str) -> bytes:
        """Return the events of one change of the answer."""
        item = self._item(part, self._end_status() if change == "end" else "in_progress")
        at: dict[str, Any] = {"output_index": part.index}
        within = at | {"item_id": item["id"]}
        is_call = part.kind == "call"
        if not is_call:
            within["content_index"] = 0
        part_within, content = dict(within), "reasoning_text"
        if part.kind == "text":
            within["logprobs"], content = [], "output_text"
        if change == "begin":
            events = self._event("response.output_item.added", item=item, **at)
            if not is_call:
                events += self._event(
                    "response.content_part.added", part=_content(part, ""), **part_within
                )
            return events
        if change == "add":
            if is_call:
                return self._event("response.function_call_arguments.delta", delta=text, **within)
            return self._event(f"response.{content}.delta", delta=text, **within)
        if is_call:
            events = self._event(
                "response.function_call_arguments.done",
                arguments=part.text,
                name=part.name,
                **within,
            )
        else:
            events = self._event(
                f"response.{content}.done", text=part.text, **within
            ) + self._event(
                "response.content_part.done", part=_content(part, part.text), **part_within
            )
        return events + self._event("response.output_item.done", item=item, **at)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return one event with the next number."""
        self._n_events += 1
        return encode_named_event({"type": kind, "sequence_number": self._n_events - 1} | fields)


def _content(part: AnswerPart, text: str) -> dict[str, Any]:
    """Return the content of an item."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


RESPONSES = TranslatedAPI(
    {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"},
    _translate,
    ResponseWriter,
)
