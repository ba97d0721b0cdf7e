"""Read calls of tools out of an answer, while it grows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex as re

from skipsearch.models.chat.tool_formats import IDS, NAME, Fields, Tool, ToolFormat, is_text

# The beginning of an object of JSON that may be a call. Its brackets may be doubled: Qwen 2.5's
# template shows them so by mistake, and small models imitate it.
_CHECKED_OBJECT = r'(?:\{\s*)*(?=\{\s*"(?:name|arguments|parameters)"\s*:)'
# The same, but only with keys in another order or with doubled brackets.
_OBJECT = (
    r'(?:(?=\{\s*(?:"(?:arguments|parameters|id|type|index)"\s*:|"name"\s*:\s*"[^"\\\n]*"\s*'
    r'(?:\}|,\s*"(?!arguments"|parameters")\w+"|,\s*"\w+"\s*:\s*\{\s*\{)))|\{\s*'
    rf"{_CHECKED_OBJECT})"
)
_SPACED = r'{}\[\]()":,'  # may have white space next to them, in a class of an expression


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


@dataclass(frozen=True)
class _Patterns:
    """How the calls of a form begin, and the marks after their arguments.

    anywhere: in a text. bare: at the start of an answer, or after a call. closing: by the name of a
    group in these expressions.
    """

    anywhere: Any
    bare: Any
    closing: Mapping[str, tuple[str, ...]]


@cache
def _compile_patterns(form: ToolFormat) -> _Patterns:
    anywhere, bare, closing = list[str](), list[str](), dict[str, tuple[str, ...]]()
    begin = _make_tolerant(form.begin)
    for i, call in enumerate((form.call, *form.also)):
        before, after = call.split("$arguments")
        ends = (*_split_marks(after, form), form.separator.strip(), *_split_marks(form.end, form))
        closing[f"call{i}"] = tuple(filter(None, ends))
        head = _make_tolerant(before)
        if form.fields is None:
            head += r"\s*(?=\{(?!\s*\{))"
        elif form.fields.parts[0]:
            marks = (form.fields.parts[0].strip().split("\n")[0], after.split()[0])
            head += rf"\s*(?={'|'.join(map(re.escape, marks))})"
        starts = [rf"(?P<call{i}>{head})"]
        prefix, name, _ = before.partition('{"name"')
        if name and not prefix.endswith("{"):
            starts.append(rf"(?P<object{i}>{_make_tolerant(prefix)}{_OBJECT})")
            closing[f"object{i}"] = closing[f"call{i}"]
        either = f"(?:{'|'.join(starts)})"
        if not call.startswith("{"):
            anywhere.append(f"(?:{begin})?{either}" if begin else either)
        else:
            bare.append(rf"(?:\[\s*)?{either}")
            if begin:
                anywhere.append(begin + either)
    for i, (opening, end) in enumerate(form.fences):
        one = rf"(?P<fence{i}>{_make_tolerant(opening)}\s*{_CHECKED_OBJECT})"
        (anywhere if opening else bare).append(one)
        closing[f"fence{i}"] = ("}", end) if end else ("}",)
    if form.dropped:
        anywhere.append(f"(?P<dropped>{form.dropped})")
    never = "(?!)"
    return _Patterns(
        re.compile("|".join(anywhere) or never, re.DOTALL),
        re.compile("|".join(bare) or never, re.DOTALL),
        closing,
    )


def _split_marks(text: str, form: ToolFormat) -> list[str]:
    """Return the marks of a text after the arguments, before each of which may be white space.

    After arguments in JSON a closing bracket is a mark of its own; `[/END]` is one mark.
    """
    if form.fields is not None:
        return text.split()
    return re.findall(r"[\])}]|[^\s\[\])}]*\[[^\s\]]*\]|[^\s\])}]+", text)


def _make_tolerant(text: str) -> str:
    """Return an expression for a text of a form, with any white space where JSON allows it."""
    pattern = ""
    for part in re.findall(rf"\s+|[{_SPACED}]|\$\w+|[^\s{_SPACED}$]+", text):
        if part.isspace():
            pattern += r"\s*"
        elif part == "$name":
            pattern += rf"\s*(?P<name>{NAME})"
        elif part in IDS:
            pattern += IDS[part][0]
        elif part in ("arguments", "parameters"):
            pattern += "(?:arguments|parameters)"
        else:
            space = r"\s*" if re.fullmatch(f"[{_SPACED}]", part) else ""
            pattern += space + re.escape(part) + space
    pattern = re.sub(r"(?:\\s\*)+", lambda _: r"\s*", pattern)
    return str(pattern).removeprefix(r"\s*")


class CallReader:
    """Separates calls from other text, while an answer grows.

    max_calls: later calls are dropped; None: there is no limit. tools: those that may be called;
    their schemas say which values are text, and what fits a tool without a mark is its call.
    """

    def __init__(self, form: ToolFormat, max_calls: int | None = None, tools: Sequence[Tool] = ()):
        self.form, self.max_calls, self.n_calls = form, max_calls, 0
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._patterns = _compile_patterns(form)
        self._buffer = ""  # text that was not read yet
        self._may_begin = True  # a call without a mark may begin here
        # Reads a part of the buffer and returns content; None if it needs more text.
        self._read: Callable[[bool], str | None] = self._read_content
        self._opening, self._object = "", ""  # text of what may turn out to be no call
        self._is_fenced = False
        self._fence_closing: tuple[str, ...] = ()
        self._name, self._n_fields = "", 0
        self._closing: list[str] = []  # marks that may still follow the call that was read
        self._json = _JSONEnd()
        self._deltas: list[CallDelta] = []

    def feed(self, text: str, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Read more of the answer; return the content and the deltas of calls that it adds.

        last: the answer ends here. A call that cannot be read is then content.
        """
        self._buffer += text
        self._deltas, content = [], ""
        while self._buffer or last:
            part = self._read(last)
            if part is None:
                break
            content += part
        return content, self._deltas

    def _read_content(self, last: bool) -> str | None:
        """Move content from the buffer, up to the beginning of a call."""
        if last and self.n_calls:
            self._drop_cut_call()
        if not self._buffer:
            return None
        if self._may_begin:
            start = len(self._buffer) - len(self._buffer.lstrip())
            match = self._patterns.bare.match(self._buffer, start, partial=not last)
            if match and match.partial:
                return None
            if match and self._is_allowed(match):
                return self._begin(match, last)
        search = self._patterns.anywhere.search
        match = search(self._buffer, partial=not last)
        while match and not match.partial and not self._is_allowed(match):
            match = search(self._buffer, match.end(), partial=not last)
        if match and not match.partial:
            return self._begin(match, last)
        content = self._buffer[: match.start()] if match else self._buffer
        if not last:  # white space before a call belongs to the call
            content = content.rstrip()
        self._buffer = self._buffer[len(content) :]
        if content:
            self._may_begin, self._fence_closing = False, ()
        return content or None

    def _drop_cut_call(self) -> None:
        """Drop the beginning of a further call at the end of the answer, which a limit cut off."""
        patterns, text = self._patterns, self._buffer
        cut = patterns.anywhere.search(text, partial=True)
        if cut and cut.partial:
            self._buffer = text[: cut.start()].rstrip() if cut.start() < len(text) else text
        start = len(text) - len(text.lstrip())
        cut = patterns.bare.match(text, start, partial=True) if self._may_begin else None
        if cut and cut.partial:
            self._buffer = ""

    def _is_allowed(self, match: Any) -> bool:
        return bool(self._schemas) or not match.lastgroup.startswith("fence")

    def _begin(self, match: Any, last: bool) -> str | None:
        """Begin to read what matched. Returns the content before it; None if it needs more text."""
        if not last and self._buffer[match.end() :].rstrip() == "{":
            return None  # the bracket may be doubled
        group = next(
            name
            for name in (*self._patterns.closing, "dropped")
            if match.groupdict().get(name) is not None
        )
        content, self._opening = self._buffer[: match.start()], match[0]
        self._buffer = self._buffer[match.end() :]
        self._may_begin = self._may_begin and not content.strip()
        if group == "dropped":
            return content
        closing = self._patterns.closing[group]
        self._is_fenced = group.startswith("fence")
        if self._is_fenced:  # the next call may be in the same fence
            closing = self._fence_closing = max(closing, self._fence_closing, key=len)
        self._closing, self._object, self._json = list(closing), "", _JSONEnd()
        if not group.startswith("call"):
            self._read = self._read_object
            return content.rstrip()
        self._name, self._n_fields = match["name"], 0
        if self.form.fields is not None and self.form.fields.quote:
            self._read = self._read_bare_object
            return content.rstrip()
        self._add_call(self._name)
        self._read = self._read_json if self.form.fields is None else self._read_fields
        return content.rstrip()

    def _add_call(self, name: str, arguments: str = "") -> None:
        if self.max_calls is None or self.n_calls < self.max_calls:
            self._deltas.append(CallDelta(self.n_calls, name, arguments))
        self.n_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text and (self.max_calls is None or self.n_calls <= self.max_calls):
            self._deltas.append(CallDelta(self.n_calls - 1, arguments=text))

    def _take_json(self) -> tuple[str, bool]:
        """Move JSON from the buffer. Returns (text, whether the object is complete)."""
        end = self._json.find(self._buffer)
        text = self._buffer[:end]
        self._buffer = self._buffer[len(text) :]
        return text, end is not None

    def _read_json(self, last: bool) -> str | None:
        """Move arguments in JSON to a delta."""
        text, is_complete = self._take_json()
        self._add_arguments(text)
        self._read = self._read_closing if is_complete else self._read
        return "" if is_complete else None

    def _read_object(self, last: bool) -> str | None:
        """Read a call that is an object of JSON, after it is complete."""
        text, is_complete = self._take_json()
        self._object += text
        if not is_complete and not last:
            return None
        try:
            call = _parse_object(self._object)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, RecursionError, KeyError):
            return self._give_up(self._object)
        if not isinstance(name, str) or (self._is_fenced and not self._fits(name, arguments)):
            return self._give_up(self._object)
        self._add_call(name, json.dumps(arguments, ensure_ascii=False))
        self._read = self._read_closing
        return ""

    def _fits(self, name: str, arguments: Any) -> bool:
        """Return whether a tool takes these arguments: it has the name, and none is missing."""
        schema = self._schemas.get(name)
        return (
            schema is not None
            and isinstance(arguments, dict)
            and arguments.keys() >= set(schema.get("required") or ())
        )

    def _read_fields(self, last: bool) -> str | None:
        """Move a field of the arguments to a delta, after it is complete."""
        fields = self.form.fields
        assert fields is not None
        text, (_, between, after) = self._buffer.lstrip(), fields.parts
        match = _field_pattern(fields).match(text, partial=not last)
        if match is None:
            self._add_arguments("}" if self._n_fields else "{}")
            self._read = self._read_closing
            return ""
        end = -1 if match.partial else text.find(after.strip(), match.end())
        if end < 0:
            self._buffer = "" if last else self._buffer
            self._read = self._read_content if last else self._read
            return None
        value = text[match.end() : end]
        value = value.removeprefix("\n") if between.endswith("\n") else value
        value = value.removesuffix("\n") if after.startswith("\n") else value
        self._buffer = text[end + len(after.strip()) :]
        key = match["key"]
        schema = (self._schemas.get(self._name, {}).get("properties") or {}).get(key)
        field = {key: _parse_value(value, schema)}
        self._add_arguments(
            (", " if self._n_fields else "{") + json.dumps(field, ensure_ascii=False)[1:-1]
        )
        self._n_fields += 1
        return ""

    def _read_bare_object(self, last: bool) -> str | None:
        """Read arguments with bare keys and marks around texts, after they are complete."""
        assert self.form.fields is not None
        body, end, rest = self._buffer.partition(self._closing[0])
        if not end and not last:
            return None
        text = body if end else body.rstrip().removesuffix("}")
        arguments = _parse_bare_object(text, self.form.fields.quote)
        if arguments is None:
            self._buffer = rest
            return self._give_up(body + end)
        self._buffer, self._closing = rest, self._closing[1:]
        self._add_call(self._name, json.dumps(arguments, ensure_ascii=False))
        self._read = self._read_closing
        return ""

    def _read_closing(self, last: bool) -> str | None:
        """Skip what closes a call, which a model may leave out. Then another call may follow."""
        if not self._closing:
            self._read, self._may_begin = self._read_content, True
            return ""
        text, mark = self._buffer.lstrip(), self._closing[0]
        if mark == "}":  # small models miscount them
            text = text.lstrip("} \n")
        if not last and len(text) < len(mark) and mark.startswith(text):
            return None
        self._buffer = text.removeprefix(self._closing.pop(0))
        return ""

    def _give_up(self, text: str) -> str:
        """Return what turned out to be no call."""
        self._read, self._may_begin = self._read_content, False
        return self._opening + text


@cache
def _field_pattern(fields: Fields) -> Any:
    before, between, _ = (re.sub(r"\\?\s+", lambda _: r"\s*", re.escape(p)) for p in fields.parts)
    return re.compile(before + r"(?P<key>[^<>\n]+?)" + between.removesuffix(r"\s*"))


def _parse_value(text: str, schema: Any) -> Any:
    """Return the value of a field: text if its schema says so, else JSON if it can be read."""
    kinds = schema.get("type") if isinstance(schema, dict) else "string"
    is_null = text == "null" and "null" in json.dumps(schema)
    if (is_text(schema) and not is_null) or text in (schema or {}).get("enum", ()):
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text if kinds != "null" else None


def _parse_bare_object(body: str, quote: str) -> dict[str, Any] | None:
    """Return an object whose keys have no quotes and whose texts have marks; None for others."""
    mark = re.escape(quote)
    parts = re.split(rf'({mark}.*?{mark}|"(?:[^"\\]|\\.)*")', "{" + body + "}", flags=re.DOTALL)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part)
        elif part.startswith(quote):
            parts[i] = json.dumps(part[len(quote) : -len(quote)])
    try:
        parsed = json.loads("".join(parts))
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _parse_object(text: str) -> Any:
    """Return the value of JSON whose brackets may be doubled. Raises: ValueError,
    RecursionError.
    """
    try:
        return json.loads(text)
    except ValueError:
        parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
        parts[::2] = (re.sub(r"([{}])\s*\1", r"\1", part) for part in parts[::2])
        return json.loads("".join(parts))


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


def has_own_reader(tokenizer: Any) -> bool:
    """Return whether a tokenizer says itself how answers are read (`response_template`)."""
    return bool(getattr(tokenizer, "response_template", None))


class SchemaCallReader:
    """Reads an answer by the tokenizer's own `response_template`, when the answer is complete.

    max_calls, tools: as for `CallReader`.
    """

    def __init__(self, tokenizer: Any, max_calls: int | None = None, tools: Sequence[Tool] = ()):
        self.tokenizer, self.max_calls, self.n_calls = tokenizer, max_calls, 0
        self._text, self._tools = "", list(tools)

    def feed(self, text: str, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Read more of the answer, special tokens included; as `CallReader.feed`."""
        self._text += text
        if not last:
            return "", []
        try:
            message = self.tokenizer.parse_response(self._text, prefix="", tools=self._tools)
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
