"""Draw a benchmark: time per token by system, and by context length if that was measured."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from skipsearch.bench.benchmark import BenchRow
from skipsearch.core.files import check_writable, save_file
from skipsearch.errors import DecodeError

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_file(
    file: Path, inputs: Mapping[str, Iterable[Path]] = MappingProxyType({})
) -> None:
    """Check before the measurement that a picture can be written to `file`.

    inputs: files that must not be overwritten, by option, as for `check_writable`.

    Raises: DecodeError.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise DecodeError(
            f"--picture {file} is no picture that can be drawn: choose another file, ending in "
            ".png, .svg or .pdf"
        )
    check_writable(file, replace=True, error=DecodeError, option="--picture", inputs=inputs)


def plot_rows(rows: Sequence[BenchRow], title: str, file: Path) -> None:
    """Write the picture as .png, .svg or .pdf, in one atomic step.

    Raises: DecodeError if matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DecodeError(
            "a picture needs matplotlib, which is not installed: pip install matplotlib, or leave "
            "--picture out"
        ) from None
    check_plot_file(file)
    by_context = any(row.by_context for row in rows)
    figure = Figure(figsize=(11 if by_context else 7, 0.5 * len(rows) + 1.8), layout="constrained")
    axes = figure.subplots(1, 2 if by_context else 1, squeeze=False)[0]
    names = [row.system for row in rows]
    low = [row.ms_per_token - row.ms_per_token_quartiles[0] for row in rows]
    high = [row.ms_per_token_quartiles[1] - row.ms_per_token for row in rows]
    bars = axes[0].barh(
        names,
        [row.ms_per_token for row in rows],
        xerr=[low, high],
        color="#4477aa",
        ecolor="#222222",
        capsize=3,
    )
    axes[0].bar_label(bars, [f" {row.speedup.mean:.2f}×" for row in rows], padding=6)
    axes[0].invert_yaxis()
    axes[0].set_xlabel(
        f"ms per verified token, median and quartiles\n(×: speed over {rows[0].system})"
    )
    axes[0].margins(x=0.15)
    if by_context:
        for row in rows:
            axes[1].plot(
                list(row.by_context), list(row.by_context.values()), marker="o", label=row.system
            )
        axes[1].set_xscale("log", base=2)
        axes[1].set_xticks(sorted({c for row in rows for c in row.by_context}))
        axes[1].xaxis.set_major_formatter("{x:.0f}")
        axes[1].set_ylim(bottom=0)
        axes[1].set_xlabel("context, tokens")
        axes[1].set_ylabel("ms per verified token")
        axes[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=file.suffix[1:].lower())
    save_file(file, drawn.getvalue(), DecodeError)
