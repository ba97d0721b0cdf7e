"""A drawn figure: for a notebook a picture, for the page an SVG that follows the page's colours, and its numbers as a table."""

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
from skipsearch.report.theme import COLOURS, style

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_LIGHT = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
_REFERENCE = re.compile(r"(?:(?<=url\()|^)#")
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")   # what XML cannot hold
_LONGEST_LABEL = 40


class NothingToDraw(SkipSearchError):
    """What was recorded does not hold what a figure shows; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Drawn:
    """A figure with its numbers.

    figure: matplotlib's. columns, rows: the numbers, as text. tips: for each drawn group, by its id, what a mark in it says under the
    pointer, in the order in which marks were drawn.
    """

    name: str
    figure: Any
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    tips: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        file = io.BytesIO()
        with style(), _quiet():
            self.figure.savefig(file, format="png", dpi=110)
        return file.getvalue()

    def svg(self, labelled_by: str, described_by: str) -> str:
        """An `<svg>` for the middle of an HTML page: no ids of two figures clash, and nothing in it is fetched or run."""
        file = io.StringIO()
        with style(), _quiet():
            import matplotlib

            with matplotlib.rc_context({"svg.hashsalt": self.name}):   # the same figure has the same ids in every run
                self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        root = ElementTree.fromstring(file.getvalue())
        for parent, tag in ((root, "metadata"), (root.find(f"{{{_SVG}}}defs"), "style")):   # the style would be the whole page's
            if parent is not None and (child := parent.find(f"{{{_SVG}}}{tag}")) is not None:
                parent.remove(child)
        for element in root.iter():
            for key, value in element.attrib.items():
                if key == "id":
                    element.set(key, f"{self.name}-{value}")
                elif key in {"clip-path", f"{{{_XLINK}}}href"}:
                    element.set(key, _REFERENCE.sub(f"#{self.name}-", value))
                elif key == "style":
                    element.set(key, re.sub(r"#[0-9a-f]{6}", lambda found: _LIGHT.get(found[0], found[0]), value))
        for group, tips in self.tips.items():
            self._attach(root, f"{self.name}-{group}", tips)
        for key in ("width", "height", "version"):
            root.attrib.pop(key, None)
        root.attrib.update({"role": "img", "aria-labelledby": labelled_by, "aria-describedby": described_by})
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", _XLINK)
        return ElementTree.tostring(root, encoding="unicode")

    def _attach(self, root: ElementTree.Element, group: str, tips: Sequence[str]) -> None:
        found = next(g for g in root.iter(f"{{{_SVG}}}g") if g.get("id") == group)
        shapes = {shape for definitions in found.iter(f"{{{_SVG}}}defs") for shape in definitions.iter()}
        marks = [m for m in found.iter() if m.tag in {f"{{{_SVG}}}use", f"{{{_SVG}}}path"} and m not in shapes]
        for mark, tip in zip(marks, tips, strict=True):
            ElementTree.SubElement(mark, f"{{{_SVG}}}title").text = clean(tip)


def clean(text: object) -> str:
    """Text without what XML cannot hold: a name in a study may be anything."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))


def label(text: object) -> str:
    """A name short enough to stand in a figure, on one line."""
    line = " ".join(clean(text).split())
    return line if len(line) <= _LONGEST_LABEL else f"{line[:_LONGEST_LABEL - 1]}…"


def times(value: float | None, digits: int = 2) -> str:
    """`1.31×`; nothing for what is not known."""
    return "" if value is None else f"{value:.{digits}f}×"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


@contextmanager
def _quiet() -> Iterator[None]:
    """matplotlib measures text with a font that may lack a letter, which the reader's browser has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        yield
