"""Colours for matplotlib and for the page, which replaces the light colours in dark mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skipsearch.errors import ExportError

INK, MUTED, GRID, PAPER, GAIN = ("#1f2328", "#5b636d", "#d5dae0", "#ffffff", "#2a6db3")
# CSS variable -> (light, dark). Light colours are unique, because the SVG is searched for them.
COLOURS: dict[str, tuple[str, str]] = {
    "ink": (INK, "#e6e9ee"),
    "muted": (MUTED, "#a3acb8"),
    "grid": (GRID, "#3a414b"),
    "paper": (PAPER, "#15181d"),
    "gain": (GAIN, "#67a9ee"),
    "s0": ("#2f6fb4", "#6cb0f2"),
    "s1": ("#c05a0c", "#ff9f50"),
    "s2": ("#00796b", "#4ccab2"),
    "s3": ("#b0307a", "#f283c2"),
    "s4": ("#6a4fb3", "#b7a2ff"),
    "s5": ("#86690a", "#d9bc4e"),
    "s6": ("#c62835", "#ff8083"),
    "s7": ("#5f6b75", "#a9b5c1"),
}
SERIES_COLOURS = [light for name, (light, _) in COLOURS.items() if name.startswith("s")]
MARKERS = "os^DvPX*"  # searchers differ in the marker, too


@contextmanager
def themed_figure() -> Iterator[Any]:
    """Yield matplotlib's `Figure` class, and use the theme inside the context.

    An SVG contains text as text, not as curves. `$` starts no formula. Raises: ExportError without
    matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ExportError(
            "a report needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    with rc_context(
        {
            "svg.fonttype": "none",
            "text.parse_math": False,
            "axes.formatter.use_mathtext": False,
            "font.family": "sans-serif",
            "font.size": 9.5,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.edgecolor": MUTED,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "grid.color": GRID,
            "axes.facecolor": "none",
            "figure.facecolor": PAPER,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": False,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "axes.titlesize": 9.5,
            "axes.titlelocation": "left",
            "axes.unicode_minus": False,
        }
    ):
        yield Figure


def series_style(index: int) -> dict[str, Any]:
    """Return colour and marker of the index-th searcher."""
    cycle = index // len(SERIES_COLOURS)  # a later cycle uses other markers
    return {
        "color": SERIES_COLOURS[index % len(SERIES_COLOURS)],
        "marker": MARKERS[(index + cycle) % len(MARKERS)],
    }


def css_variables(dark: bool) -> str:
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())
