"""Text from outside on a terminal: names, prompts, model output and messages that quote them are
shown and never obeyed.

A terminal takes some characters as commands: they clear it, rename its window, or hide what was
printed. Every command prints through `Terminal`, which shows those characters as escapes (`\\x1b`)
and reads no markup, so no command has to think of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0, DEL and C1 controls; bidi embeddings, overrides and isolates, which reorder what stands beside
# them; halves of surrogate pairs.
_CONTROL_CHARS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROLS_IN_TEXT = re.compile(f"[{_CONTROL_CHARS}]")
_CONTROLS_IN_LINE = re.compile(f"[\t\n\u2028\u2029{_CONTROL_CHARS}]")
_SHORT_ESCAPES = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}


def escape_controls(text: str, multiline: bool = False) -> str:
    """`text` with an escape such as `\\x1b` or `\\u202e` for each character that a terminal may
    take as a command.

    multiline: the text may have several lines, so its line breaks and tabs stay. Applied twice it
    does what it does once."""
    return (_CONTROLS_IN_TEXT if multiline else _CONTROLS_IN_LINE).sub(_escape, text)


def escape_json_controls(text: str) -> str:
    """JSON with JSON's own escapes for what `json.dumps` leaves as it is: DEL, C1, bidi,
    surrogates. Equal data.
    """
    return _CONTROLS_IN_TEXT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def for_stream(text: str, stream: IO[str]) -> str:
    """A part of a text of many lines as `stream` should get it: made visible for a terminal,
    unchanged for a pipe or a file.
    """
    return escape_controls(text, multiline=True) if stream.isatty() else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT_ESCAPES.get(match[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


class Terminal(Console):
    """A console that shows text from outside as text. A string is one line, whatever it holds;
    `print_block` prints several.

    Markup is read only where `print` is told so, which is for our own words alone.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    @contextmanager
    def even_if_quiet(self) -> Iterator[None]:
        """What is printed meanwhile is printed with --quiet too: warnings and errors."""
        before, self.quiet = self.quiet, False
        try:
            yield
        finally:
            self.quiet = before

    def print_block(self, text: str) -> None:
        """Print text of several lines: its line breaks and tabs stay."""
        self.print(Text(escape_controls(text, multiline=True)))

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed, also one in a table, before its width is taken."""
        return super().render_str(escape_controls(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Whatever else is printed, such as a `Text`."""
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=escape_controls(segment.text, multiline=True))
            )
