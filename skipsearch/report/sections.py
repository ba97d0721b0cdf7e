"""The figures of the page in their order, with what each shows in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from skipsearch.profile import Profile
from skipsearch.report.closed_form import closed_form, token_times
from skipsearch.report.drafters import by_certainty, by_drafter
from skipsearch.report.drawn import Drawn
from skipsearch.report.maps import BEST, layer_map, policy_surface
from skipsearch.report.methods import Table, methods_side_by_side
from skipsearch.report.moved import WORDS, masks_over_rounds
from skipsearch.report.searches import convergence, predicted_measured, speedup_by_skipped
from skipsearch.report.study import Study


@dataclass(frozen=True)
class Section:
    """A figure and its text. draw raises NothingToDraw where what was recorded does not hold it."""

    id: str
    title: str
    words: str
    draw: Callable[[], Drawn]


def sections(studies: Sequence[Study], profile: Profile | None, tables: Sequence[Table] = ()) -> Iterator[Section]:
    """Those of tables of methods first; alone where there is neither a study nor a profile."""
    for k, table in enumerate(tables):
        yield Section(f"methods-{k}", f"Methods side by side, {table.title}",
                      "Each method at the settings that calibration text calls best, on hold-out prompts in one interleaved run, "
                      f"{table.how}, with 95 % intervals. What its paper reports, on other models and machines, stands among the numbers.",
                      partial(methods_side_by_side, table, f"methods-{k}"))
    if tables and not studies and profile is None:
        return
    searched = [study for study in studies if study.judged]
    yield Section("convergence", "Convergence by searcher",
                  "A point is a judged mask, a line the best so far. The predicted speedup is over plain decoding, the line at 1.",
                  partial(convergence, searched))
    yield Section("skipped", "Speedup against skipped sub-layers",
                  "The dashed line joins the best mask of each number of skipped sub-layers (figure 4 of Draft & Verify). Points above "
                  "each other differ only in which sub-layers they skip.", partial(speedup_by_skipped, searched))
    yield Section("predicted", "Predicted against measured",
                  "A point is a recipe that really decoded prompts, with its 95 % interval. Above the dashed line it did better than "
                  "predicted; above 1 it beat plain decoding.", partial(predicted_measured, studies, profile))
    yield Section("layers", "Layer map by searcher",
                  "A full cell is a sub-layer that the draft skips, an empty one that it keeps; shades say in how many of a searcher's "
                  f"best {BEST} masks.",
                  partial(layer_map, searched, profile))
    for study, name, of in _each(studies, "surface", lambda study: study.surface):
        yield Section(name, f"Policy surface{of}",
                      "The predicted speedup of the winner's mask under each draft policy: at most so many tokens a round (across), "
                      "drafting stopped below a confidence (down). The best is bold.", partial(policy_surface, study, name))
    yield Section("times", "Time a token", "Decoding of hold-out prompts, with and without the profile, by the same engine.",
                  partial(token_times, profile))
    yield Section("drafters", "What each drafter brought",
                  "Drafters are asked in this order in every round, and the first that proposes something drafts. The pale bar is what it "
                  "drafted, the full one what was accepted of that.", partial(by_drafter, profile))
    for study, name, of in _each(studies, "certainty", lambda study: study.brought):
        yield Section(name, f"How often drafts are right{of}",
                      "A drafter knows something before its tokens are verified: lookup, how many tokens matched; the skipped model, how "
                      "sure it is. A bar is the share of positions in the calibration text whose next token was right, at the positions "
                      "that the drafters before leave over.", partial(by_certainty, study, name))
    for study, name, of in _each(studies, "moved", lambda study: study.moved):
        yield Section(name, f"How masks moved{of}", WORDS, partial(masks_over_rounds, study, name))
    yield Section("closed-form", "Closed form beside the measurement",
                  "What draft length should give if each drafted token were accepted with the same probability α, a draft pass cost β of a "
                  "full pass and a verify pass v of one. v is that of the rounds as measured, so the curve flatters long drafts.",
                  partial(closed_form, profile))


def _each(studies: Sequence[Study], figure: str, holds: Callable[[Study], object]) -> Iterator[tuple[Study | None, str, str]]:
    """(study, name of its figure, ` of LABEL` where there are several) of each study that holds what the figure draws. Where none does, the
    first one stands in, and its figure says what is missing."""
    found = [study for study in studies if holds(study)]
    for k, study in enumerate(found or [*studies, None][:1]):
        yield study, f"{figure}-{k}" if k else figure, f" of {study.label}" if study is not None and len(found) > 1 else ""
