"""The figure of what drafts read: predicted speedup over memory."""

from __future__ import annotations

from skipsearch.report.figure import MissingData, ReportFigure, as_speedup, format_number
from skipsearch.report.recorded import StoredReading
from skipsearch.report.study_reader import StudyRecord
from skipsearch.report.theme import INK, MARKERS, MUTED, SERIES_COLOURS, themed_figure


def draw_readings(study: StudyRecord | None, name: str = "reads") -> ReportFigure:
    """Draw each number format and vocabulary by its memory and its predicted speedup.

    Raises: MissingData if the study compared none.
    """
    if study is None or not study.readings:
        raise MissingData(
            "This study compared no number formats and vocabularies: its engine has no such drafts."
        )
    readings = sorted(study.readings, key=lambda r: (r.draft_bytes, -r.speedup))
    formats = list(dict.fromkeys(r.weights for r in readings))
    tips = dict[str, list[str]]()
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 3.6), layout="constrained")
        axes = figure.subplots()
        fastest = _fastest_by_memory(readings)
        axes.plot(
            [r.draft_bytes / 1e6 for r in fastest],
            [r.speedup for r in fastest],
            linestyle="--",
            color=MUTED,
            linewidth=1,
            zorder=1,
        )
        for k, weights in enumerate(formats):
            points = [r for r in readings if r.weights == weights]
            axes.plot(
                [r.draft_bytes / 1e6 for r in points],
                [r.speedup for r in points],
                MARKERS[k % len(MARKERS)],
                color=SERIES_COLOURS[k % len(SERIES_COLOURS)],
                label=weights,
                gid=f"format-{k}",
            )
            tips[f"format-{k}"] = [
                f"{r}: {as_speedup(r.speedup)}, α {r.alpha:.2f}, β {r.beta:.2f}, "
                f"{r.draft_bytes / 1e6:.0f} MB"
                for r in points
            ]
        best = max(readings, key=lambda r: r.speedup)
        axes.annotate(
            str(best),
            (best.draft_bytes / 1e6, best.speedup),
            (6, 6),
            textcoords="offset points",
            color=INK,
            fontsize="small",
        )
        axes.margins(x=0.08, y=0.15)
        axes.axhline(1, color=MUTED, linewidth=0.8)
        axes.set(xlabel="memory besides the model, MB", ylabel="predicted speedup")
        axes.legend(frameon=False, ncols=len(formats), loc="lower right")
    rows = [
        [
            r.weights,
            "all" if r.tokens is None else f"{r.tokens:,}",
            format_number(r.alpha),
            format_number(r.beta),
            f"{r.draft_bytes / 1e6:.1f}",
            as_speedup(r.speedup),
        ]
        for r in sorted(readings, key=lambda r: -r.speedup)
    ]
    return ReportFigure(
        name, figure, ("weights", "tokens", "α", "β", "memory (MB)", "predicted"), rows, tips
    )


def _fastest_by_memory(readings: list[StoredReading]) -> list[StoredReading]:
    """Return the readings that are faster than all that take less memory."""
    fastest = list[StoredReading]()
    for reading in readings:  # by memory
        if not fastest or reading.speedup > fastest[-1].speedup:
            fastest.append(reading)
    return fastest
