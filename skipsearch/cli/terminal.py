"""Text from outside on a terminal: names, prompts and generated text are shown and never obeyed.

A terminal takes some characters as commands, which clear it, rename its window, or hide what was
printed. Every command prints through `Terminal`, which shows these characters as escapes (`\\x1b`)
and reads no markup. So no command needs code of its own for this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0, DEL and C1 controls; bidi embeddings, overrides and isolates, which reorder the text next to
# them; lone surrogates.
_CONTROL_CHARS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROLS_IN_TEXT = re.compile(f"[{_CONTROL_CHARS}]")
_CONTROLS_IN_LINE = re.compile(f"[\t\n\u2028\u2029{_CONTROL_CHARS}]")
_SHORT_ESCAPES = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}


def escape_controls(text: str, multiline: bool = False) -> str:
    """Return `text` with escapes for the characters that a terminal may take as commands.

    Examples of escapes are `\\x1b` and `\\u202e`. multiline: keep line breaks and tabs, because the
    text may have several lines.
    The function does not change a text that it has escaped already.
    """
    return (_CONTROLS_IN_TEXT if multiline else _CONTROLS_IN_LINE).sub(_escape, text)


def escape_json_controls(text: str) -> str:
    """Return JSON in which also DEL, C1 controls, bidi characters and surrogates are escaped.

    `json.dumps` does not escape these. The data that a reader gets are the same.
    """
    return _CONTROLS_IN_TEXT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def for_stream(text: str, stream: IO[str]) -> str:
    """Return text for `stream`: escaped for a terminal, unchanged for a pipe or a file.

    text: may be a part of a longer text.
    """
    return escape_controls(text, multiline=True) if stream.isatty() else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT_ESCAPES.get(match[0]) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


class Terminal(Console):
    """A console that shows text from outside as text.

    A string is printed as one line, whatever characters it has; `print_block` prints several lines.
    `print` reads markup only if its argument `markup` is set. This is for our own texts.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    @contextmanager
    def even_if_quiet(self) -> Iterator[None]:
        """Run a block whose output is printed with --quiet too: warnings and errors."""
        before, self.quiet = self.quiet, False
        try:
            yield
        finally:
            self.quiet = before

    def print_block(self, text: str) -> None:
        """Print text of several lines. Its line breaks and tabs are kept."""
        self.print(Text(escape_controls(text, multiline=True)))

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape every printed string, also one in a table, before its width is computed."""
        return super().render_str(escape_controls(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape what does not pass through `render_str`, such as a `Text`."""
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=escape_controls(segment.text, multiline=True))
            )
