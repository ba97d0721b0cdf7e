"""The sections of the page in their order: figure, title and explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from skipsearch.profile import Profile
from skipsearch.report.drafter_figures import draw_drafters, draw_reliability
from skipsearch.report.figure import ReportFigure
from skipsearch.report.layer_map import N_BEST_MASKS, draw_layer_map
from skipsearch.report.profile_figures import draw_token_times
from skipsearch.report.reading_figure import draw_readings
from skipsearch.report.search_figures import (
    draw_convergence,
    draw_predictions,
    draw_speedup_by_skipped,
)
from skipsearch.report.study_reader import StudyRecord


@dataclass(frozen=True)
class Section:
    """A figure of the page and its text."""

    id: str
    title: str
    words: str  # what the figure shows
    draw: Callable[[], ReportFigure]  # raises MissingData if data are missing


def list_sections(studies: Sequence[StudyRecord], profile: Profile | None) -> Iterator[Section]:
    """Yield the sections of the page."""
    searched = [study for study in studies if study.judged]
    yield Section(
        "convergence",
        "Convergence by searcher",
        "A point is a judged mask. The dark line is the best so far of the whole search, a "
        "coloured one that of a single searcher. The predicted speedup is over plain decoding, "
        "the line at 1.",
        partial(draw_convergence, searched),
    )
    yield Section(
        "skipped",
        "Speedup against skipped sub-layers",
        "The dashed line joins the best mask of each number of skipped sub-layers (figure 4 of "
        "Draft & Verify). Each mask is drawn with the exit policy, the draft length and what the "
        "draft reads that suit it best.",
        partial(draw_speedup_by_skipped, searched),
    )
    yield Section(
        "predicted",
        "Predicted against measured",
        "A point is a recipe that decoded prompts, with its 95 % interval. Above the dashed "
        "line it did better than "
        "predicted; above 1 it beat plain decoding.",
        partial(draw_predictions, studies, profile),
    )
    yield Section(
        "layers",
        "Layer map by searcher",
        "A full cell is a sub-layer that the draft skips, an empty one that it keeps; shades say "
        "in how many of a searcher's "
        f"best {N_BEST_MASKS} masks.",
        partial(draw_layer_map, searched, profile),
    )
    with_readings = [study for study in studies if study.readings]
    for study, name, suffix in _each_study(with_readings, "reads", lambda study: study.readings):
        if study is not None:
            yield Section(
                name,
                f"What drafts read{suffix}",
                "A point is a number format of the draft's weights with a vocabulary, nothing "
                "skipped: its predicted speedup, and the memory that it takes besides the "
                "model's. The dashed line joins the fastest of each amount of memory.",
                partial(draw_readings, study, name),
            )
    yield Section(
        "times",
        "Time a token",
        "Decoding of hold-out prompts, with and without the profile, by the same engine.",
        partial(draw_token_times, profile),
    )
    yield Section(
        "drafters",
        "What each drafter contributed",
        "In every round the first drafter in this order that proposes something drafts. The pale "
        "bar counts its drafted tokens, the full one those that were accepted.",
        partial(draw_drafters, profile),
    )
    for study, name, suffix in _each_study(studies, "certainty", lambda study: study.reliability):
        yield Section(
            name,
            f"How often drafts are right{suffix}",
            "Before verification, lookup knows how many tokens matched, and the draft model how "
            "confident it is. A bar is the share of positions in the calibration text whose next "
            "token was right, among the positions at which the drafters before it propose nothing.",
            partial(draw_reliability, study, name),
        )


def _each_study(
    studies: Sequence[StudyRecord], figure: str, has_data: Callable[[StudyRecord], object]
) -> Iterator[tuple[StudyRecord | None, str, str]]:
    """Yield (study, figure name, title suffix) for each study that has the data of a figure.

    The suffix is ` of LABEL` if several studies have the data, else empty. If no study has the
    data, yield the first study, or None if there is none; the figure then names the missing data.
    """
    matching = [study for study in studies if has_data(study)]
    for k, study in enumerate(matching or [*studies, None][:1]):
        yield (
            study,
            f"{figure}-{k}" if k else figure,
            f" of {study.label}" if study is not None and len(matching) > 1 else "",
        )
