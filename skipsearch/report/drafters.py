"""Figures of what the drafters of a recipe bring: each as a whole, and by what it knows before it drafts."""

from __future__ import annotations

from skipsearch.profile import Profile
from skipsearch.report.closed_form import NO_PROFILE
from skipsearch.report.drawn import Drawn, NothingToDraw
from skipsearch.report.recorded import BroughtGroup
from skipsearch.report.study import Study
from skipsearch.report.theme import SERIES, style


def by_drafter(profile: Profile | None) -> Drawn:
    """Tokens that each drafter drafted and that were accepted of these, over all prompts, in the order of the recipe.

    Raises: NothingToDraw without a measured profile that counted its drafters.
    """
    if profile is None:
        raise NothingToDraw(NO_PROFILE)
    counts = profile.measured.by_drafter if profile.measured else ()
    if not counts:
        raise NothingToDraw("This profile does not say what each of its drafters brought: none was measured, or a version measured it that "
                            "did not count them." if profile.candidate.drafters else "This profile drafts nothing.")
    names = [f"{i}. {drafter}" for i, drafter in enumerate(profile.candidate.drafters, 1)]
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 0.8 + 0.62 * len(names)), layout="constrained")
        axes = figure.subplots()
        places = range(len(names))
        for gid, amounts, opacity in (("drafted", [c.drafted for c in counts], 0.3), ("accepted", [c.accepted for c in counts], 1.0)):
            for k in places:
                axes.barh([k], [amounts[k]], height=0.55, color=SERIES[0], alpha=opacity, gid=f"{gid}-{k}")
        for k, c in enumerate(counts):
            axes.annotate(_share(c.accepted, c.drafted), (c.drafted, k), (6, 0), textcoords="offset points", va="center")
            axes.text(0, k - 0.32, names[k], va="bottom")
        axes.set(xlim=(0, 1.12 * max(1, *(c.drafted for c in counts))), ylim=(len(names) - 0.55, -0.75), xlabel="tokens over all prompts")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    rows = [[name, str(c.rounds), str(c.drafted), str(c.accepted), _share(c.accepted, c.drafted)]
            for name, c in zip(names, counts, strict=True)]
    tips = {f"{gid}-{k}": [f"{names[k]}: {c.accepted} of {c.drafted} drafted tokens accepted, in {c.rounds} rounds"]
            for gid in ("drafted", "accepted") for k, c in enumerate(counts)}
    return Drawn("drafters", figure, ("drafter", "rounds", "tokens drafted", "accepted", "accepted of drafted"), rows, tips)


def by_certainty(study: Study | None, name: str = "certainty") -> Drawn:
    """How often the next token is right, by tokens that matched (lookup) and by top probability (skip), at the positions of the
    calibration text that each drafter of the winner is asked at. name: of the figure, where a page has several.

    Raises: NothingToDraw if the study holds no such counts.
    """
    if study is None:
        raise NothingToDraw("It needs a study: give one with --study.")
    if not study.brought:
        raise NothingToDraw("This study does not say how often its drafters were right: it ended before its winner was known, its task "
                            "samples, or a version that did not count it made it.")
    panels = list(dict.fromkeys((group.drafter, group.by) for group in study.brought))
    rows, tips = [], {}
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 2.4 * len(panels)), layout="constrained")
        for k, (drafter, by) in enumerate(panels):
            axes = figure.add_subplot(len(panels), 1, k + 1)
            groups = [group for group in study.brought if (group.drafter, group.by) == (drafter, by)]
            for n, group in enumerate(groups):
                gid, share, what = f"group-{k}-{n}", group.right / group.positions, _between(group)
                axes.bar([n], [share], width=0.7, color=SERIES[0], alpha=0.85, gid=gid)
                axes.annotate(str(group.positions), (n, share), (0, 2), textcoords="offset points", ha="center", fontsize="small")
                tips[gid] = [f"{by} {what}: {group.right} of {group.positions} right ({share:.0%})"]
                rows.append([f"{drafter + 1}. by {by}", what, str(group.positions), str(group.right), f"{share:.0%}"])
            axes.set(ylim=(0, 1.14), ylabel="right", xlabel=f"drafter {drafter + 1}, by {by}; above the bars: positions",
                     xticks=range(len(groups)))
            axes.set_xticklabels([_between(group) for group in groups])
    return Drawn(name, figure, ("drafter", "range", "positions", "right", "share"), rows, tips)


def _between(group: BroughtGroup) -> str:
    if group.by == "confidence":
        return f"{group.low:.1f}–{group.high:.1f}"
    low, last = int(group.low), int(group.high) - 1
    return str(low) if low == last else f"{low}–{last}"


def _share(accepted: int, drafted: int) -> str:
    return f"{accepted / drafted:.0%}" if drafted else "never asked, or had nothing to say"
