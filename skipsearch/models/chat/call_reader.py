"""Read calls of tools out of an answer, while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skipsearch.models.chat.tool_formats import ToolFormat

# The beginning of a call up to its arguments. A name has no escapes: those of tools never do.
_CALL_HEAD = re.compile(
    r'[\s\[,;]*\{\s*"name"\s*:\s*"([^"\\\n]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass
class CallDelta:
    """What a part of the text added to a call.

    index: of the call in the answer. name: of the tool, in the first delta only. arguments: more of
    the JSON text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


def merge_deltas(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Return one delta for each call: clients expect no call twice in one event."""
    merged: dict[int, CallDelta] = {}
    for delta in deltas:
        first = merged.setdefault(delta.index, CallDelta(delta.index))
        first.name = first.name or delta.name
        first.arguments += delta.arguments
    return list(merged.values())


@dataclass
class CallReader:
    """Separates calls from other text, while an answer grows.

    max_calls: later calls are dropped; None: there is no limit.
    """

    form: ToolFormat
    max_calls: int | None = None
    n_calls: int = 0
    _buffer: str = ""  # text that is neither content nor part of a call yet
    _in_call: bool = False
    _closing: list[str] = field(default_factory=list)  # what still closes the call that was read
    _arguments: _JSONEnd | None = None  # of the call that is being read
    _may_start: bool = True  # the answer has no text yet
    _deltas: list[CallDelta] = field(default_factory=list)

    def feed(self, text: str, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Read more of the answer; return the content and the deltas of calls that it adds.

        last: the answer ends here. A call that cannot be read is then content.
        """
        self._buffer += text
        self._deltas, content = [], ""
        while True:
            before = self._state
            content += self._read_call(last) if self._in_call else self._read_content(last)
            if self._state == before:
                return content, self._deltas

    @property
    def _state(self) -> tuple[int, bool, int, bool]:
        return len(self._buffer), self._in_call, len(self._closing), self._arguments is not None

    def _read_content(self, last: bool) -> str:
        """Move content from the buffer, up to the beginning of a call."""
        if self.form.at_start and not self._may_start:
            content, self._buffer = self._buffer, ""
            return content
        text = self._buffer.lstrip() if self.form.at_start else self._buffer
        for start in self.form.starts:
            at = 0 if self.form.at_start and text.startswith(start) else -1
            at = text.find(start) if not self.form.at_start else at
            if at >= 0:
                # `{` and `[` are part of the call.
                self._buffer = text[at + (0 if start in ("{", "[{") else len(start)) :]
                self._in_call = True
                return text[:at].rstrip()
        n_held = 0
        if not last:
            n_held = max(
                (
                    n
                    for start in self.form.starts
                    for n in range(min(len(text), len(start)) + 1)
                    if text.endswith(start[:n]) and (not self.form.at_start or n == len(text))
                ),
                default=0,
            )
        if not self.form.at_start and not last:  # white space before a call belongs to the call
            n_held += len(text[: len(text) - n_held]) - len(text[: len(text) - n_held].rstrip())
        content, self._buffer = text[: len(text) - n_held], text[len(text) - n_held :]
        self._may_start = self._may_start and not content
        return content

    def _read_call(self, last: bool) -> str:
        """Move a part of a call from the buffer. Returns content if it is none."""
        if self._closing:
            return self._read_closing(last)
        if self._arguments is None:
            head = _CALL_HEAD.match(self._buffer)
            if head is not None:
                self._begin_call(head[1])
                self._arguments, self._buffer = _JSONEnd(), self._buffer[head.end() :]
            elif (call := self._complete_call()) is not None:
                self._begin_call(call[0])
                self._add_arguments(json.dumps(call[1], ensure_ascii=False))
                self._closing = list(filter(None, [self.form.end.strip()]))
            elif self._ends_calls(last):
                return self._give_up(last)
            return ""
        end = self._arguments.find(self._buffer)
        part = self._buffer if end is None else self._buffer[:end]
        self._add_arguments(part)
        self._buffer = self._buffer[len(part) :]
        if end is not None:
            self._arguments = None
            self._closing = list(filter(None, ["}", self.form.end.strip()]))
        return ""

    def _complete_call(self) -> tuple[str, Any] | None:
        """Return (name, arguments) of a call with its keys in another order, and remove it."""
        text = self._buffer.lstrip(" \n\t\r[,;")
        try:
            call, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        self._buffer = text[end:]
        return call["name"], call.get("arguments", call.get("parameters", {}))

    def _begin_call(self, name: str) -> None:
        if self.max_calls is None or self.n_calls < self.max_calls:
            self._deltas.append(CallDelta(self.n_calls, name))
        self.n_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text and (self.max_calls is None or self.n_calls <= self.max_calls):
            self._deltas.append(CallDelta(self.n_calls - 1, arguments=text))

    def _read_closing(self, last: bool) -> str:
        """Skip what closes a call. A model may leave it out. Then another call may follow."""
        text, closing = self._buffer.lstrip(), self._closing[0]
        if not last and len(text) < len(closing) and closing.startswith(text):
            return ""
        self._buffer = text.removeprefix(self._closing.pop(0))
        self._in_call = bool(self._closing) or not self.form.end
        return ""

    def _ends_calls(self, last: bool) -> bool:
        """Return whether no further call can follow in the buffer."""
        return last or bool(self.form.end and self.form.end.strip() in self._buffer)

    def _give_up(self, last: bool) -> str:
        """Return the rest as content if it is no call and follows none."""
        text, self._buffer, self._in_call = self._buffer, "", False
        self._may_start = False
        if self.n_calls:  # what closes a list of calls, or a call that the limit cut off
            return ""
        return (self.form.starts[0] if self.form.end else "") + text


class _JSONEnd:
    """Finds the end of a JSON object in a growing text."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """Read more text; return the index after the object's end in it, or None."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return None


class SchemaCallReader:
    """Reads an answer with the tokenizer's own response schema, when the answer is complete.

    max_calls: as for `CallReader`.
    """

    def __init__(self, tokenizer: Any, max_calls: int | None = None):
        self.tokenizer, self.max_calls, self.n_calls = tokenizer, max_calls, 0
        self._text = ""

    def feed(self, text: str, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Read more of the answer, special tokens included; as `CallReader.feed`."""
        self._text += text
        if not last:
            return "", []
        try:
            message = self.tokenizer.parse_response(self._text)
            calls = [call["function"] for call in message.get("tool_calls") or []]
            deltas = [
                CallDelta(i, str(call["name"]), _as_json(call.get("arguments")))
                for i, call in enumerate(calls[: self.max_calls])
            ]
        except Exception:  # an answer that the schema does not match is text
            return self._text, []
        self.n_calls = len(deltas)
        return str(message.get("content") or ""), deltas


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
