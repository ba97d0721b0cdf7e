"""A strict reader for a small part of YAML: one document of maps, lists and scalars.

Profiles and tasks are read by it. It works on the parser's events, so no object is constructed at
the request of a file. Scalars follow YAML 1.2's JSON schema: `true`, `false`, `null` and JSON's
numbers. Every other plain scalar is text, dates, `012`, `1:30` and `yes` included. If the schema
expects a number there, it rejects the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from skipsearch.errors import ProfileError, SkipSearchError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8
MAX_NODES = 8192  # limits the time of a hostile file; a profile of 1024 layers has about 2200
_MAX_DIGITS = 40

KeyPath = tuple[str | int, ...]
# libyaml, if PyYAML was built with it, is 20 times faster.
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_OTHER_SPELLING = re.compile(
    r"~|[Nn]ull|NULL|[Tt]rue|TRUE|[Ff]alse|FALSE|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)|"
)
_LITERALS: dict[str, bool | None] = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class FileKind:
    """A kind of file that the reader expects, such as a profile, for its error messages.

    error: the class of the errors.
    noun: the name of the kind in a message, such as `profile`.
    first_key: the key with which every file of this kind begins.
    """

    error: type[SkipSearchError]
    noun: str
    first_key: str


PROFILE_FILE = FileKind(ProfileError, "profile", "schema_version")


@dataclass(slots=True)
class Document:
    """The content of a file.

    data: dict, list, str, int, float, bool or None.
    lines: the line, from 1, of every key path.
    """

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line_of(self, path: KeyPath) -> int | None:
        """Return the line of the deepest part of `path` that the file has.

        Parts that it lacks, such as the tag of a union, are ignored.
        """
        known: KeyPath = ()
        for part in path:
            known = (*known, part) if (*known, part) in self.lines else known
        return self.lines[known] if known else None


def format_location(name: str, line: int | None = None, path: KeyPath = ()) -> str:
    """Return `file, line 3, drafters[0].attn[2]`, as far as known."""
    keys = "".join(
        f"[{key}]" if isinstance(key, int) else f".{make_printable(key)}" for key in path
    ).removeprefix(".")
    return ", ".join(part for part in (name, f"line {line}" if line else "", keys) if part)


def read_yaml(content: bytes, name: str, file_kind: FileKind = PROFILE_FILE) -> Document:
    """Parse the content of one file.

    name: of the file, for errors.

    Raises: the error of `file_kind` that names file, line, key and rule, for anything invalid.
    """
    if len(content) > MAX_BYTES:
        raise file_kind.error(
            f"{name}: the file is larger than {MAX_BYTES // 1024} KiB, which no {file_kind.noun} "
            "needs"
        )
    if content.startswith(b"\xef\xbb\xbf"):
        raise file_kind.error(
            f"{name}, line 1: the file starts with a byte order mark; save it as UTF-8 without BOM"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise file_kind.error(
            f"{format_location(name, line)}: byte {error.start} is not UTF-8; save the file as "
            "UTF-8"
        ) from None
    return _EventReader(text, name, file_kind).read()


def is_plain_text(text: str) -> bool:
    """Return whether this reader reads the text, written without quotes, as text."""
    return not (text in _LITERALS or _NUMBER.fullmatch(text) or _OTHER_SPELLING.fullmatch(text))


class _EventReader:
    """A reader that builds plain values from YAML parser events.

    It rejects anchors, aliases, tags and other features beyond maps, lists and scalars.
    """

    def __init__(self, text: str, name: str, file_kind: FileKind) -> None:
        self.name, self.file_kind = name, file_kind
        self.events: Iterator[Any] = self._parse_events(text)
        self.document = Document()
        self.n_nodes = 0

    def _parse_events(self, text: str) -> Iterator[Any]:
        try:
            yield from yaml.parse(text, Loader=_PARSER)
        except yaml.MarkedYAMLError as error:
            problem = _shorten_problem(error.problem or error.context)
            line = error.problem_mark.line + 1 if error.problem_mark else None
            raise self.file_kind.error(
                f"{format_location(self.name, line)}: this is not YAML: {problem}"
            ) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise self.file_kind.error(
                f"{format_location(self.name, line)}: this is not YAML: it holds a control "
                "character"
            ) from None
        except (
            yaml.YAMLError,
            ValueError,
            OverflowError,
        ) as error:  # ValueError, OverflowError: an escape beyond the parser's range
            raise self.file_kind.error(
                f"{self.name}: this is not YAML: {_shorten_problem(error)}"
            ) from None

    def read(self) -> Document:
        next(self.events)  # the stream itself
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            raise self.file_kind.error(
                f"{self.name}: the file is empty; a {self.file_kind.noun} is a map that starts "
                "with "
                f"{self.file_kind.first_key}"
            )
        if start.version or start.tags:
            raise self._make_error(start, (), "directives (`%…`) are not allowed")
        self.document.data = self._read_value(next(self.events), (), 1)
        next(self.events)  # the document's end
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._make_error(
                after, (), f"a second document starts here; a {self.file_kind.noun} is one document"
            )
        return self.document

    def _read_value(self, event: Any, path: KeyPath, depth: int) -> Any:
        self.n_nodes += 1
        self.document.lines[path] = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise self._make_error(
                event,
                path,
                f"aliases (`*{make_printable(str(event.anchor))}`) are not allowed; write the "
                "value out",
            )
        if event.anchor is not None:
            raise self._make_error(
                event,
                path,
                f"anchors (`&{make_printable(event.anchor)}`) are not allowed; write the value out",
            )
        if event.tag is not None:
            raise self._make_error(
                event,
                path,
                f"tags (`{make_printable(event.tag)}`) are not allowed; write a plain value",
            )
        if self.n_nodes > MAX_NODES:
            raise self._make_error(
                event,
                path,
                f"there are more than {MAX_NODES} values, which no {self.file_kind.noun} needs",
            )
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else self._read_plain_scalar(event, path)
        if depth > MAX_DEPTH:
            raise self._make_error(
                event,
                path,
                f"values are nested deeper than {MAX_DEPTH} levels, which no {self.file_kind.noun} "
                "needs",
            )
        return (
            self._read_map(path, depth)
            if isinstance(event, yaml.MappingStartEvent)
            else self._read_list(path, depth)
        )

    def _read_map(self, path: KeyPath, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        first_line = self.document.lines[path]
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._read_value(event, path, depth + 1)
            if not isinstance(key, str):
                raise self._make_error(event, path, "a key must be a word")
            if key in entries:
                raise self._make_error(event, (*path, key), "this key is written twice; keep one")
            entries[key] = self._read_value(next(self.events), (*path, key), depth + 1)
            self.document.lines[(*path, key)] = event.start_mark.line + 1
            self.document.lines[path] = first_line  # and not that of its last key
        return entries

    def _read_list(self, path: KeyPath, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._read_value(event, (*path, len(items)), depth + 1))
        return items

    def _read_plain_scalar(self, event: Any, path: KeyPath) -> Any:
        text: str = event.value
        if text in _LITERALS:
            return _LITERALS[text]
        if _OTHER_SPELLING.fullmatch(text):
            seen = f"`{text}`" if text else "nothing"
            raise self._make_error(
                event,
                path,
                f"{seen} stands here; write null, true, false, a finite number or quoted text",
            )
        number = _NUMBER.fullmatch(text)
        if not number:
            return text
        if len(text) > _MAX_DIGITS:
            raise self._make_error(
                event, path, f"a number may have {_MAX_DIGITS} characters, not {len(text)}"
            )
        value = float(text) if number[2] or number[3] else int(text)
        if not math.isfinite(value):
            raise self._make_error(event, path, f"{text} is too large; write a finite number")
        return value

    def _make_error(self, event: Any, path: KeyPath, rule: str) -> SkipSearchError:
        return self.file_kind.error(
            f"{format_location(self.name, event.start_mark.line + 1, path)}: {rule}"
        )


def _shorten_problem(problem: object) -> str:
    return make_printable(" ".join(str(problem).split()), 200)


def make_printable(text: str, max_length: int = 40) -> str:
    """Return text from outside in a form that is safe on one line of a terminal.

    Characters that cannot be printed become `?`. Text beyond `max_length` becomes `…`.
    """
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= max_length else f"{shown[:max_length]}…"
