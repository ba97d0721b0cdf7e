"""Figures of searches: how fast they found what they found, what skipping more costs, and whether prediction held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from skipsearch.errors import SearchError
from skipsearch.profile import Profile
from skipsearch.report.closed_form import by_counts
from skipsearch.report.drawn import Drawn, NothingToDraw, label, number, times
from skipsearch.report.study import Judged, Study
from skipsearch.report.theme import INK, MUTED, PAPER, series, style
from skipsearch.stats import Estimate

NO_STUDY = "It needs a search of masks: give the journal that `skipsearch tune` wrote beside the profile with --study."


def groups(studies: Sequence[Study]) -> list[tuple[str, list[Judged]]]:
    """What is told apart by colour: the searchers of one study, or several studies. Label and judged masks of each."""
    if len(studies) == 1:
        return [(name, [j for j in studies[0].judged if j.searcher == name]) for name in studies[0].searchers]
    return [(study.label, list(study.judged)) for study in studies]


def check_comparable(studies: Sequence[Study], profile: Profile | None = None) -> None:
    """Raises: SearchError for searches, or a search and a profile, of two models: their masks mean different things."""
    models = [(study.label, study.identity.get("model"), study.n_layers) for study in studies]
    if profile is not None:
        models.append(("the profile", profile.model.id, profile.model.n_layers))
    for what, model, n_layers in models[1:]:
        if (model, n_layers) != models[0][1:]:
            raise SearchError(f"{label(models[0][0])} is of {label(models[0][1])} ({models[0][2]} layers) and {label(what)} of "
                              f"{label(model)} ({n_layers} layers): a report compares searches of one model; make one report for each")


def convergence(studies: Sequence[Study]) -> Drawn:
    """The best predicted speedup after each judged mask and, where it was recorded, after each second of search.

    Raises: NothingToDraw without a study.
    """
    _require(studies)
    clocks = [study.clock for study in studies]
    panels: list[tuple[str, list[list[float]]]] = [("masks judged", [[float(i + 1) for i in range(len(s.judged))] for s in studies])]
    if None not in clocks:
        panels.append(("seconds of search", [clock for clock in clocks if clock is not None]))
    names = [name for name, _ in groups(studies)]
    tips: dict[str, list[str]] = {}
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 3.7), layout="constrained")
        for p, (axes, (title, xs)) in enumerate(zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True)):
            for k, name in enumerate(names):
                own = [(x, j) for study, at in zip(studies, xs, strict=True) for x, j in zip(at, study.judged, strict=True)
                       if name == (j.searcher if len(studies) == 1 else study.label)]
                tips[f"trials-{p}-{k}"] = [f"{name}: {_described(j)}" for _, j in own]
                axes.scatter([x for x, _ in own], [j.speedup for _, j in own], s=20, alpha=0.65, linewidths=0, gid=f"trials-{p}-{k}",
                             label=label(name) if p == 0 else None, **series(k))
            for k, (study, at) in enumerate(zip(studies, xs, strict=True)):
                axes.plot(at, study.best_so_far, drawstyle="steps-post", gid=f"best-{p}-{k}",
                          color=INK if len(studies) == 1 else series(k)["color"])
            _break_even(axes)
            axes.set_xlabel(title)
            axes.set_xlim(left=0)
        figure.axes[0].locator_params(axis="x", integer=True)
        figure.axes[0].set_ylabel("predicted speedup")
        _legend(figure, figure.axes[0])
    rows = [[study.label, str(i), j.searcher, str(j.trial.mask.n_skipped), times(j.speedup, 3), times(best, 3), number(j.trial.alpha),
             number(j.trial.tau), number(j.trial.beta), j.recipe, number(j.trial.search_seconds)]
            for study in studies for i, (j, best) in enumerate(zip(study.judged, study.best_so_far, strict=True), 1)]
    return Drawn("convergence", figure, ("study", "mask", "searcher", "sub-layers skipped", "predicted", "best so far", "α", "τ", "β",
                                         "recipe", "seconds"), rows, tips)


def speedup_by_skipped(studies: Sequence[Study]) -> Drawn:
    """Predicted speedup against the number of skipped sub-layers, the best of each number dashed.

    Raises: NothingToDraw without a study. Source: Draft & Verify (Zhang et al. 2024), figure 4.
    """
    _require(studies)
    by_count: dict[int, list[float]] = defaultdict(list)
    tips: dict[str, list[str]] = {}
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 3.9), layout="constrained")
        axes = figure.subplots()
        for k, (name, judged) in enumerate(groups(studies)):
            axes.scatter([j.trial.mask.n_skipped for j in judged], [j.speedup for j in judged], s=20, alpha=0.65, linewidths=0,
                         gid=f"trials-{k}", label=label(name), **series(k))
            tips[f"trials-{k}"] = [f"{name}: {_described(j)}" for j in judged]
            for j in judged:
                by_count[j.trial.mask.n_skipped].append(j.speedup)
        counts = sorted(by_count)
        axes.plot(counts, [max(by_count[c]) for c in counts], "--", color=MUTED, lw=1.2, gid="best", label="best of each number")
        _break_even(axes)
        total = 2 * studies[0].n_layers
        axes.set_xlim(0, total)
        axes.set_xlabel(f"sub-layers skipped, of {total}")
        axes.set_ylabel("predicted speedup")
        _legend(figure, axes)
    rows = [[str(c), str(len(by_count[c])), *(times(of(by_count[c]), 3) for of in (max, median, min))] for c in counts]
    return Drawn("skipped", figure, ("sub-layers skipped", "masks judged", "best", "median", "worst"), rows, tips)


@dataclass(frozen=True)
class Compared:
    """A recipe that was both predicted and measured. what: where from; skipped: sub-layers; both are speedups."""

    what: str
    recipe: str
    skipped: int
    predicted: float
    measured: Estimate

    @property
    def in_words(self) -> str:
        found = self.measured
        return (f"{self.what}: predicted {times(self.predicted)}, measured {times(found.mean)} ({found.low:.2f}–{found.high:.2f}), "
                f"{self.recipe}")


def compared(studies: Sequence[Study], profile: Profile | None = None) -> list[Compared]:
    """Every recipe that a study raced after it had predicted it, and a measured profile beside what its own counts come to."""
    found = [Compared(f"{study.label}, {r.split}", str(r), mask.n_skipped if (mask := study.mask_of(r)) else 0, promised,
                      Estimate(r.speedup.mean, r.speedup.low, r.speedup.high))
             for study in studies for r in study.raced if (promised := study.promised(r)) is not None]
    if profile is not None and profile.measured is not None and (counted := by_counts(profile)) is not None:
        speedup = profile.measured.speedup
        found.append(Compared("profile, from its own counts", str(profile.candidate), profile.mask.n_skipped, counted,
                              Estimate(speedup.mean, *speedup.ci95)))
    return found


def predicted_measured(studies: Sequence[Study], profile: Profile | None = None) -> Drawn:
    """What was predicted of a recipe against what real decoding measured, with 95 % intervals.

    Raises: NothingToDraw without a race in a study and without a measured profile that drafts.
    """
    points = compared(studies, profile)
    if not points:
        raise NothingToDraw("This study holds no race: it has not come to decoding with its best recipes, or was made by a version that "
                            "did not keep what was measured." if studies else
                            "This profile has no measured draft to compare a prediction with.")
    reached = [1.0, *(value for p in points for value in (p.predicted, p.measured.low, p.measured.high))]
    edge = 0.06 * (max(reached) - min(reached)) or 0.1
    span = (min(reached) - edge, max(reached) + edge)
    tips: dict[str, list[str]] = {}
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(span, span, "--", color=MUTED, lw=1.2, gid="diagonal", label="measured as predicted")
        _break_even(axes)
        axes.axvline(1, color=MUTED, lw=1, zorder=0)
        for k, what in enumerate(dict.fromkeys(p.what for p in points)):
            own = [p for p in points if p.what == what]
            xs = [p.predicted for p in own]
            axes.vlines(xs, [p.measured.low for p in own], [p.measured.high for p in own], color=series(k)["color"], lw=1.4,
                        gid=f"intervals-{k}")
            axes.scatter(xs, [p.measured.mean for p in own], s=34, edgecolors=PAPER, linewidths=0.6, zorder=3, gid=f"raced-{k}",
                         label=label(what), **series(k))
            tips[f"raced-{k}"] = [p.in_words for p in own]
        axes.set(xlim=span, ylim=span, xlabel="predicted speedup", ylabel="measured speedup")
        _legend(figure, axes)
    rows = [[p.what, str(p.skipped), p.recipe, times(p.predicted, 3), times(p.measured.mean, 3),
             f"{p.measured.low:.3f}–{p.measured.high:.3f}", f"{100 * (p.measured.mean / p.predicted - 1):+.1f} %"] for p in points]
    return Drawn("predicted", figure, ("what", "sub-layers skipped", "recipe", "predicted", "measured", "95 %", "difference"), rows, tips)


def _require(studies: Sequence[Study]) -> None:
    if not studies:
        raise NothingToDraw(NO_STUDY)
    check_comparable(studies)


def _described(judged: Judged) -> str:
    trial = judged.trial
    facts = [f"{name} {value:.2f}" for name, value in (("α", trial.alpha), ("τ", trial.tau), ("β", trial.beta)) if value is not None]
    return ", ".join([times(judged.speedup), f"{trial.mask.n_skipped} skipped", *facts, judged.recipe])


def _break_even(axes: Any) -> None:
    axes.axhline(1, color=MUTED, lw=1, zorder=0)


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    fitting = 100 // (max(map(len, labels)) + 6)   # letters in the width of the figure, with room for the mark
    figure.legend(handles, labels, loc="outside upper left", ncols=max(1, min(fitting, len(labels))), handletextpad=0.4, columnspacing=1.4)
