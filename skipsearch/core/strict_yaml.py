"""A strict reader for a small part of YAML: one document of maps, lists and scalars.

Profiles and tasks are read by it. It is PyYAML's safe loader with more rules. Scalars follow YAML
1.2's JSON schema: `true`, `false`, `null` and JSON's numbers. Every other plain scalar is text,
dates, `012`, `1:30` and `yes` included. If the schema expects a number there, it rejects the text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from skipsearch.errors import ProfileError, SkipSearchError

MAX_BYTES = 128 * 1024
MAX_DEPTH = 8
MAX_NODES = 8192  # limits the time of a hostile file; a profile of 1024 layers has about 2200
_MAX_DIGITS = 40
_LITERALS = ("null", "true", "false")
_WRITE_OUT = "write the value out"

KeyPath = tuple[str | int, ...]
# libyaml, if PyYAML was built with it, is 20 times faster.
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_OTHER_SPELLING = re.compile(
    r"~|[Nn]ull|NULL|[Tt]rue|TRUE|[Ff]alse|FALSE|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)|"
)


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
    problem_line: int | None = None
    try:
        loader = _Loader(text, name, file_kind)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        problem_line = text.count("\n", 0, error.position) + 1
        problem = "it holds a control character"
    except yaml.MarkedYAMLError as error:
        problem_line = error.problem_mark.line + 1 if error.problem_mark else None
        problem = ", ".join(filter(None, (error.context, error.problem)))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        problem = str(error)  # ValueError, OverflowError: an escape beyond the parser's range
    else:
        if root is not None:
            return Document(loader.construct_document(root), loader.lines)
        raise file_kind.error(
            f"{name}: the file is empty; a {file_kind.noun} is a map that starts with "
            f"{file_kind.first_key}"
        )
    problem = make_printable(" ".join(problem.split()), 200)
    raise file_kind.error(f"{format_location(name, problem_line)}: this is not YAML: {problem}")


def is_plain_text(text: str) -> bool:
    """Return whether this reader reads the text, written without quotes, as text."""
    return not (text in _LITERALS or _NUMBER.fullmatch(text) or _OTHER_SPELLING.fullmatch(text))


class _Loader(Composer, SafeConstructor, Resolver):
    """PyYAML's safe loader without anchors, tags and other features beyond maps, lists and scalars.

    It checks the parser's events while it composes nodes, so that an error has a line and a key
    path, and nothing is constructed of a file that breaks a rule.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def __init__(self, text: str, name: str, file_kind: FileKind) -> None:
        for base in (Composer, SafeConstructor, Resolver):
            base.__init__(self)
        parser = _PARSER(text)
        self.check_event, self.peek_event = parser.check_event, parser.peek_event
        self.get_event = parser.get_event
        self.name, self.file_kind = name, file_kind
        self.lines: dict[KeyPath, int] = {}
        self.path: KeyPath = ()
        self.depth = self.n_nodes = 0

    def compose_document(self) -> Any:
        start = self.peek_event()
        if start.version or start.tags:
            raise self._make_error(start, "directives (`%…`) are not allowed")
        return super().compose_document()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one node. index: its place in a list; the key's node in a map; None for a key."""
        event, outer_path = self.peek_event(), self.path
        if isinstance(index, yaml.Node):
            if index.tag != "tag:yaml.org,2002:str":
                raise self._make_error(index, "a key must be a word")
            self.path = (*outer_path, index.value)
            if self.path in self.lines:
                raise self._make_error(index, "this key is written twice; keep one")
            self.lines[self.path] = index.start_mark.line + 1
        elif index is not None:
            self.path = (*outer_path, index)
        self.lines.setdefault(self.path, event.start_mark.line + 1)
        self.n_nodes += 1
        self.depth += 1
        if problem := self._find_problem(event):
            raise self._make_error(event, problem)
        node = super().compose_node(parent, index)
        self.depth -= 1
        self.path = outer_path
        return node

    def _find_problem(self, event: Any) -> str:
        """Return the rule that the node of this event breaks; an empty text if none."""
        if isinstance(event, yaml.AliasEvent):
            return f"aliases (`*{make_printable(str(event.anchor))}`) are not allowed; {_WRITE_OUT}"
        if event.anchor is not None:
            return f"anchors (`&{make_printable(event.anchor)}`) are not allowed; {_WRITE_OUT}"
        if event.tag is not None:
            return f"tags (`{make_printable(event.tag)}`) are not allowed; write a plain value"
        if self.n_nodes > MAX_NODES:
            return f"there are more than {MAX_NODES} values, which no {self.file_kind.noun} needs"
        if isinstance(event, yaml.ScalarEvent):
            return "" if event.style else _find_scalar_problem(event.value)
        if self.depth > MAX_DEPTH:
            return (
                f"values are nested deeper than {MAX_DEPTH} levels, which no {self.file_kind.noun} "
                "needs"
            )
        return ""

    def _make_error(self, place: Any, rule: str) -> SkipSearchError:
        """place: the event or node with the line."""
        location = format_location(self.name, place.start_mark.line + 1, self.path)
        return self.file_kind.error(f"{location}: {rule}")


for _tag, _pattern in (
    ("null", "null"),
    ("bool", "true|false"),
    ("int", "-?(0|[1-9][0-9]*)"),
    ("float", _NUMBER.pattern),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), None
    )


def _find_scalar_problem(text: str) -> str:
    """Return the rule that a plain scalar breaks; an empty text if none."""
    if text not in _LITERALS and _OTHER_SPELLING.fullmatch(text):
        seen = f"`{text}`" if text else "nothing"
        return f"{seen} stands here; write null, true, false, a finite number or quoted text"
    if not _NUMBER.fullmatch(text):
        return ""
    if len(text) > _MAX_DIGITS:
        return f"a number may have {_MAX_DIGITS} characters, not {len(text)}"
    return "" if math.isfinite(float(text)) else f"{text} is too large; write a finite number"


def make_printable(text: str, max_length: int = 40) -> str:
    """Return text from outside in a form that is safe on one line of a terminal.

    Characters that cannot be printed become `?`. Text beyond `max_length` becomes `…`.
    """
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= max_length else f"{shown[:max_length]}…"
