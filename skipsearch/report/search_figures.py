"""Figures of searches: convergence, speedup by skipped sub-layers, predicted against measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Estimate
from skipsearch.errors import SearchError
from skipsearch.profile import Profile
from skipsearch.report.figure import (
    MissingData,
    ReportFigure,
    as_speedup,
    format_number,
    shorten_label,
)
from skipsearch.report.profile_figures import speedup_from_counts
from skipsearch.report.study_reader import JudgedTrial, StudyRecord
from skipsearch.report.theme import INK, MUTED, PAPER, series_style, themed_figure

STUDY_MISSING = (
    "It needs a search of masks: give the journal that `skipsearch tune` wrote next to the profile "
    "with --study."
)


def group_trials(studies: Sequence[StudyRecord]) -> list[tuple[str, list[JudgedTrial]]]:
    """Return (label, judged masks) of each series, which has a colour of its own.

    A series is a searcher if there is one study, else a study.
    """
    if len(studies) == 1:
        return [
            (name, [j for j in studies[0].judged if j.searcher == name])
            for name in studies[0].searchers
        ]
    return [(study.label, list(study.judged)) for study in studies]


def check_comparable(studies: Sequence[StudyRecord], profile: Profile | None = None) -> None:
    """Check that all searches and the profile are of one model.

    Masks of two models mean different things. Raises: SearchError.
    """
    models = [(study.label, study.identity.get("model"), study.n_layers) for study in studies]
    if profile is not None:
        models.append(("the profile", profile.model.id, profile.model.n_layers))
    for name, model, n_layers in models[1:]:
        if (model, n_layers) != models[0][1:]:
            raise SearchError(
                f"{shorten_label(models[0][0])} is of {shorten_label(models[0][1])} "
                f"({models[0][2]} layers) and {shorten_label(name)} of "
                f"{shorten_label(model)} ({n_layers} layers): a report compares searches of one "
                "model; make one report for each"
            )


def _name_skipped(mask: SkipMask) -> str:
    """Return `attn 3 5; mlp 4` for the sub-layers that a mask skips."""
    parts = {"attn": mask.attn, "mlp": mask.mlp}
    return "; ".join(
        f"{kind} {' '.join(map(str, layers))}" for kind, layers in parts.items() if layers
    )


def draw_convergence(studies: Sequence[StudyRecord]) -> ReportFigure:
    """Draw the best predicted speedup after each judged mask, and over time.

    Raises: MissingData without a study.
    """
    _require_study(studies)
    panels = [
        ("masks judged", [[float(i + 1) for i in range(len(s.judged))] for s in studies]),
        ("seconds of search", [study.elapsed_s for study in studies]),
    ]
    names = [name for name, _ in group_trials(studies)]
    tips: dict[str, list[str]] = {}
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 3.7), layout="constrained")
        for p, (axes, (title, xs)) in enumerate(
            zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True)
        ):
            for k, name in enumerate(names):
                points = [
                    (x, j)
                    for study, study_xs in zip(studies, xs, strict=True)
                    for x, j in zip(study_xs, study.judged, strict=True)
                    if name == (j.searcher if len(studies) == 1 else study.label)
                ]
                tips[f"trials-{p}-{k}"] = [f"{name}: {_describe_trial(j)}" for _, j in points]
                axes.scatter(
                    [x for x, _ in points],
                    [j.speedup for _, j in points],
                    s=20,
                    alpha=0.65,
                    linewidths=0,
                    gid=f"trials-{p}-{k}",
                    label=shorten_label(name) if p == 0 else None,
                    **series_style(k),
                )
                if len(studies) == 1 and points:  # the best so far of this searcher alone
                    axes.plot(
                        [x for x, _ in points],
                        list(accumulate((j.speedup for _, j in points), max)),
                        drawstyle="steps-post",
                        linewidth=0.9,
                        color=series_style(k)["color"],
                    )
            for k, (study, study_xs) in enumerate(zip(studies, xs, strict=True)):
                axes.plot(
                    study_xs,
                    study.best_so_far,
                    drawstyle="steps-post",
                    gid=f"best-{p}-{k}",
                    color=INK if len(studies) == 1 else series_style(k)["color"],
                )
            _draw_break_even(axes)
            axes.set_xlabel(title)
            axes.set_xlim(left=0)
        figure.axes[0].locator_params(axis="x", integer=True)
        figure.axes[0].set_ylabel("predicted speedup")
        _draw_legend(figure, figure.axes[0])
    rows = [
        [
            study.label,
            str(i),
            j.searcher,
            str(j.trial.mask.n_skipped),
            _name_skipped(j.trial.mask),
            as_speedup(j.speedup, 3),
            as_speedup(best, 3),
            format_number(j.trial.alpha),
            format_number(j.trial.tau),
            format_number(j.trial.beta),
            j.recipe,
            format_number(j.trial.search_seconds),
        ]
        for study in studies
        for i, (j, best) in enumerate(zip(study.judged, study.best_so_far, strict=True), 1)
    ]
    return ReportFigure(
        "convergence",
        figure,
        (
            "study",
            "trial",
            "searcher",
            "sub-layers skipped",
            "which",
            "predicted",
            "best so far",
            "α",
            "τ",
            "β",
            "recipe",
            "seconds",
        ),
        rows,
        tips,
    )


def draw_speedup_by_skipped(studies: Sequence[StudyRecord]) -> ReportFigure:
    """Draw predicted speedup over the number of skipped sub-layers.

    A dashed line joins the best speedups of each number.

    Raises: MissingData without a study. Source: Draft & Verify (Zhang et al. 2024), figure 4.
    """
    _require_study(studies)
    by_count: dict[int, list[float]] = defaultdict(list)
    tips: dict[str, list[str]] = {}
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 3.9), layout="constrained")
        axes = figure.subplots()
        for k, (name, judged) in enumerate(group_trials(studies)):
            axes.scatter(
                [j.trial.mask.n_skipped for j in judged],
                [j.speedup for j in judged],
                s=20,
                alpha=0.65,
                linewidths=0,
                gid=f"trials-{k}",
                label=shorten_label(name),
                **series_style(k),
            )
            tips[f"trials-{k}"] = [f"{name}: {_describe_trial(j)}" for j in judged]
            for j in judged:
                by_count[j.trial.mask.n_skipped].append(j.speedup)
        counts = sorted(by_count)
        axes.plot(
            counts,
            [max(by_count[c]) for c in counts],
            "--",
            color=MUTED,
            lw=1.2,
            gid="best",
            label="best of each number",
        )
        _draw_break_even(axes)
        total = 2 * studies[0].n_layers
        axes.set_xlim(0, total)
        axes.set_xlabel(f"sub-layers skipped, of {total}")
        axes.set_ylabel("predicted speedup")
        _draw_legend(figure, axes)
    rows = [
        [
            str(c),
            str(len(by_count[c])),
            *(as_speedup(select(by_count[c]), 3) for select in (max, median, min)),
        ]
        for c in counts
    ]
    return ReportFigure(
        "skipped",
        figure,
        ("sub-layers skipped", "masks judged", "best", "median", "worst"),
        rows,
        tips,
    )


@dataclass(frozen=True)
class PredictionPoint:
    """A recipe whose speedup was both predicted and measured."""

    origin: str  # study and split, or the profile
    recipe: str
    n_skipped: int  # sub-layers
    predicted: float  # speedup
    measured: Estimate  # speedup

    @property
    def description(self) -> str:
        measured = self.measured
        return (
            f"{self.origin}: predicted {as_speedup(self.predicted)}, measured "
            f"{as_speedup(measured.mean)} ({measured.low:.2f}–{measured.high:.2f}), "
            f"{self.recipe}"
        )


def collect_predictions(
    studies: Sequence[StudyRecord], profile: Profile | None = None
) -> list[PredictionPoint]:
    """Return each raced recipe with a prediction in its study, and the profile.

    The profile's prediction is computed from its counts (`speedup_from_counts`).
    """
    points = [
        PredictionPoint(
            f"{study.label}, {r.split}",
            str(r.recipe),
            mask.n_skipped if (mask := study.mask_of(r)) else 0,
            predicted,
            Estimate(r.speedup.mean, r.speedup.low, r.speedup.high),
        )
        for study in studies
        for r in study.race
        if (predicted := study.predicted_speedup(r)) is not None
    ]
    if (
        profile is not None
        and profile.measured is not None
        and (counted := speedup_from_counts(profile)) is not None
    ):
        speedup = profile.measured.speedup
        points.append(
            PredictionPoint(
                "profile, from its own counts",
                str(profile.measured_recipe),
                profile.mask.n_skipped,
                counted,
                Estimate(speedup.mean, *speedup.ci95),
            )
        )
    return points


def draw_predictions(
    studies: Sequence[StudyRecord], profile: Profile | None = None
) -> ReportFigure:
    """Draw measured over predicted speedups of recipes, with 95 % intervals.

    Raises: MissingData if there is neither a study with a race nor a measured profile that drafts.
    """
    points = collect_predictions(studies, profile)
    if not points:
        raise MissingData(
            "This study holds no race: it has not come to decoding with its best recipes."
            if studies
            else "This profile has no measured draft to compare a prediction with."
        )
    reached = [
        1.0,
        *(value for p in points for value in (p.predicted, p.measured.low, p.measured.high)),
    ]
    edge = 0.06 * (max(reached) - min(reached)) or 0.1
    span = (min(reached) - edge, max(reached) + edge)
    tips: dict[str, list[str]] = {}
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            span, span, "--", color=MUTED, lw=1.2, gid="diagonal", label="measured as predicted"
        )
        _draw_break_even(axes)
        axes.axvline(1, color=MUTED, lw=1, zorder=0)
        for k, origin in enumerate(dict.fromkeys(p.origin for p in points)):
            group = [p for p in points if p.origin == origin]
            xs = [p.predicted for p in group]
            axes.vlines(
                xs,
                [p.measured.low for p in group],
                [p.measured.high for p in group],
                color=series_style(k)["color"],
                lw=1.4,
                gid=f"intervals-{k}",
            )
            axes.scatter(
                xs,
                [p.measured.mean for p in group],
                s=34,
                edgecolors=PAPER,
                linewidths=0.6,
                zorder=3,
                gid=f"raced-{k}",
                label=shorten_label(origin),
                **series_style(k),
            )
            tips[f"raced-{k}"] = [p.description for p in group]
        axes.set(xlim=span, ylim=span, xlabel="predicted speedup", ylabel="measured speedup")
        _draw_legend(figure, axes)
    rows = [
        [
            p.origin,
            str(p.n_skipped),
            p.recipe,
            as_speedup(p.predicted, 3),
            as_speedup(p.measured.mean, 3),
            f"{p.measured.low:.3f}–{p.measured.high:.3f}",
            f"{100 * (p.measured.mean / p.predicted - 1):+.1f} %",
        ]
        for p in points
    ]
    return ReportFigure(
        "predicted",
        figure,
        ("what", "sub-layers skipped", "recipe", "predicted", "measured", "95 %", "difference"),
        rows,
        tips,
    )


def _require_study(studies: Sequence[StudyRecord]) -> None:
    if not studies:
        raise MissingData(STUDY_MISSING)
    check_comparable(studies)


def _describe_trial(judged: JudgedTrial) -> str:
    trial = judged.trial
    facts = [
        f"{name} {value:.2f}"
        for name, value in (("α", trial.alpha), ("τ", trial.tau), ("β", trial.beta))
        if value is not None
    ]
    return ", ".join(
        [as_speedup(judged.speedup), f"{trial.mask.n_skipped} skipped", *facts, judged.recipe]
    )


def _draw_break_even(axes: Any) -> None:
    axes.axhline(1, color=MUTED, lw=1, zorder=0)


def _draw_legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    n_fitting = 100 // (max(map(len, labels)) + 6)  # 100 letters in a line, 6 for a mark
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=max(1, min(n_fitting, len(labels))),
        handletextpad=0.4,
        columnspacing=1.4,
    )
