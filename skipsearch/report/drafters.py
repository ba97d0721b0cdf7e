"""The figure of what each drafter of a profile brought."""

from __future__ import annotations

from skipsearch.profile import Profile
from skipsearch.report.closed_form import NO_PROFILE
from skipsearch.report.drawn import Drawn, NothingToDraw
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


def _share(accepted: int, drafted: int) -> str:
    return f"{accepted / drafted:.0%}" if drafted else "never asked, or had nothing to say"
