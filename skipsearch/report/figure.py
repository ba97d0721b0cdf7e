"""A figure: a picture for a notebook, an SVG in the colours of the page, and a table of numbers."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from skipsearch.errors import SkipSearchError
from skipsearch.report.theme import COLOURS, themed_figure

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_LIGHT = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
_REFERENCE = re.compile(r"(?:(?<=url\()|^)#")
# Characters that XML cannot contain.
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAX_LABEL_CHARS = 40


class MissingData(SkipSearchError):
    """An error that names the data that a figure lacks, and how to record them."""


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its numbers."""

    name: str  # unique in a page
    figure: Any  # matplotlib's
    columns: Sequence[str]  # headings of the table of numbers
    rows: Sequence[Sequence[str]]
    # id of a drawn group -> tooltips of its marks, in the order in which they were drawn
    tips: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        file = io.BytesIO()
        with themed_figure(), _silence_matplotlib():
            self.figure.savefig(file, format="png", dpi=110)
        return file.getvalue()

    def to_svg(self, labelled_by: str, described_by: str) -> str:
        """Return an `<svg>` to put into an HTML page.

        Ids differ between figures. The SVG loads nothing and has no script.
        """
        file = io.StringIO()
        with themed_figure(), _silence_matplotlib():
            import matplotlib

            # The salt gives a figure the same ids in every run.
            with matplotlib.rc_context({"svg.hashsalt": self.name}):
                self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        root = ElementTree.fromstring(file.getvalue())
        # Removed, because the style of one SVG applies to the whole page.
        for parent, tag in ((root, "metadata"), (root.find(f"{{{_SVG}}}defs"), "style")):
            if parent is not None and (child := parent.find(f"{{{_SVG}}}{tag}")) is not None:
                parent.remove(child)
        for element in root.iter():
            for key, value in element.attrib.items():
                if key == "id":
                    element.set(key, f"{self.name}-{value}")
                elif key in {"clip-path", f"{{{_XLINK}}}href"}:
                    element.set(key, _REFERENCE.sub(f"#{self.name}-", value))
                elif key == "style":
                    element.set(key, re.sub(r"#[0-9a-f]{6}", _colour_variable, value))
        for group, tips in self.tips.items():
            self._attach_tips(root, f"{self.name}-{group}", tips)
        for key in ("width", "height", "version"):
            root.attrib.pop(key, None)
        root.attrib.update(
            {"role": "img", "aria-labelledby": labelled_by, "aria-describedby": described_by}
        )
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", _XLINK)
        return ElementTree.tostring(root, encoding="unicode")

    def _attach_tips(self, root: ElementTree.Element, group: str, tips: Sequence[str]) -> None:
        element = next(g for g in root.iter(f"{{{_SVG}}}g") if g.get("id") == group)
        shapes = {shape for defs in element.iter(f"{{{_SVG}}}defs") for shape in defs.iter()}
        tags = {f"{{{_SVG}}}use", f"{{{_SVG}}}path"}
        marks = [mark for mark in element.iter() if mark.tag in tags and mark not in shapes]
        for mark, tip in zip(marks, tips, strict=True):
            ElementTree.SubElement(mark, f"{{{_SVG}}}title").text = strip_unprintable(tip)


def _colour_variable(colour: re.Match[str]) -> str:
    return _LIGHT.get(colour[0], colour[0])


def strip_unprintable(text: object) -> str:
    """Replace characters that XML cannot contain. Names in a study may have any character."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))


def shorten_label(text: object) -> str:
    """Shorten a name to one line that fits into a figure."""
    line = " ".join(strip_unprintable(text).split())
    return line if len(line) <= _MAX_LABEL_CHARS else f"{line[: _MAX_LABEL_CHARS - 1]}…"


def as_speedup(value: float | None, digits: int = 2) -> str:
    """Return `1.31×`, or "" for None."""
    return "" if value is None else f"{value:.{digits}f}×"


def format_number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@contextmanager
def _silence_matplotlib() -> Iterator[None]:
    """Silence warnings about letters that matplotlib's font lacks. Browsers have these letters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        yield
