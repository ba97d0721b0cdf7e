"""Figures of the drafters of a recipe: their tokens, and how often they are right."""

from __future__ import annotations

from skipsearch.profile import Profile
from skipsearch.report.figure import MissingData, ReportFigure
from skipsearch.report.profile_figures import PROFILE_MISSING
from skipsearch.report.recorded import StoredReliabilityBin
from skipsearch.report.study_reader import StudyRecord
from skipsearch.report.theme import SERIES_COLOURS, themed_figure


def draw_drafters(profile: Profile | None) -> ReportFigure:
    """Draw the drafted and accepted tokens of each drafter, in the order of the recipe.

    Raises: MissingData without a measured profile that has counts of its drafters.
    """
    if profile is None:
        raise MissingData(PROFILE_MISSING)
    counts = profile.measured.by_drafter if profile.measured else ()
    if not counts:
        raise MissingData(
            "This profile does not say what each of its drafters brought: none was measured, or a "
            "version measured it that "
            "did not count them."
            if profile.measured_recipe.drafters
            else "This profile drafts nothing."
        )
    names = [f"{i}. {drafter}" for i, drafter in enumerate(profile.measured_recipe.drafters, 1)]
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 0.8 + 0.62 * len(names)), layout="constrained")
        axes = figure.subplots()
        places = range(len(names))
        for gid, amounts, opacity in (
            ("drafted", [c.drafted for c in counts], 0.3),
            ("accepted", [c.accepted for c in counts], 1.0),
        ):
            for k in places:
                axes.barh(
                    [k],
                    [amounts[k]],
                    height=0.55,
                    color=SERIES_COLOURS[0],
                    alpha=opacity,
                    gid=f"{gid}-{k}",
                )
        for k, c in enumerate(counts):
            axes.annotate(
                _format_share(c.accepted, c.drafted),
                (c.drafted, k),
                (6, 0),
                textcoords="offset points",
                va="center",
            )
            axes.text(0, k - 0.32, names[k], va="bottom")
        axes.set(
            xlim=(0, 1.12 * max(1, *(c.drafted for c in counts))),
            ylim=(len(names) - 0.55, -0.75),
            xlabel="tokens over all prompts",
        )
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    rows = [
        [name, str(c.rounds), str(c.drafted), str(c.accepted), _format_share(c.accepted, c.drafted)]
        for name, c in zip(names, counts, strict=True)
    ]
    tips = {
        f"{gid}-{k}": [
            f"{names[k]}: {c.accepted} of {c.drafted} drafted tokens accepted, in {c.rounds} rounds"
        ]
        for gid in ("drafted", "accepted")
        for k, c in enumerate(counts)
    }
    return ReportFigure(
        "drafters",
        figure,
        ("drafter", "rounds", "tokens drafted", "accepted", "accepted of drafted"),
        rows,
        tips,
    )


def draw_reliability(study: StudyRecord | None, name: str = "certainty") -> ReportFigure:
    """Draw how often the next token is right, by matched tokens (lookup) or confidence (skip).

    The counts of each drafter of the winner are from the positions of the calibration text at which
    it would draft. name: of the figure, if a page has several. Raises: MissingData if the study has
    no such counts.
    """
    if study is None:
        raise MissingData("It needs a study: give one with --study.")
    if not study.reliability:
        raise MissingData(
            "This study does not say how often its drafters were right: it ended before its winner "
            "was known, or its task samples."
        )
    panels = list(dict.fromkeys((group.drafter, group.by) for group in study.reliability))
    rows, tips = [], {}
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 2.4 * len(panels)), layout="constrained")
        for k, (drafter, by) in enumerate(panels):
            axes = figure.add_subplot(len(panels), 1, k + 1)
            groups = [
                group for group in study.reliability if (group.drafter, group.by) == (drafter, by)
            ]
            for n, group in enumerate(groups):
                gid, label = f"group-{k}-{n}", _bin_label(group)
                share = group.right / group.positions
                axes.bar([n], [share], width=0.7, color=SERIES_COLOURS[0], alpha=0.85, gid=gid)
                axes.annotate(
                    str(group.positions),
                    (n, share),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize="small",
                )
                tips[gid] = [
                    f"{by} {label}: {group.right} of {group.positions} right ({share:.0%})"
                ]
                rows.append(
                    [
                        f"{drafter + 1}. by {by}",
                        label,
                        str(group.positions),
                        str(group.right),
                        f"{share:.0%}",
                    ]
                )
            axes.set(
                ylim=(0, 1.14),
                ylabel="right",
                xlabel=f"drafter {drafter + 1}, by {by}; above the bars: positions",
                xticks=range(len(groups)),
            )
            axes.set_xticklabels([_bin_label(group) for group in groups])
    return ReportFigure(
        name, figure, ("drafter", "range", "positions", "right", "share"), rows, tips
    )


def _bin_label(group: StoredReliabilityBin) -> str:
    if group.by == "confidence":
        return f"{group.low:.1f}–{group.high:.1f}"
    low, last = int(group.low), int(group.high) - 1
    return str(low) if low == last else f"{low}–{last}"


def _format_share(accepted: int, drafted: int) -> str:
    return f"{accepted / drafted:.0%}" if drafted else "never asked, or had nothing to say"
