"""Figures of a profile: its times, and the speedup that α, β and v alone predict."""

from __future__ import annotations

from skipsearch.core.stats import break_even_alpha, expected_speedup
from skipsearch.profile import Profile
from skipsearch.report.figure import MissingData, ReportFigure, as_speedup
from skipsearch.report.theme import GAIN, MUTED, PAPER, SERIES_COLOURS, themed_figure

PROFILE_MISSING = "It needs a profile: give one with --profile."
MAX_DRAFT_SHOWN = 16


def drafted_per_round(profile: Profile) -> float | None:
    """Return the mean number of tokens drafted in a round; None if it is unknown.

    It is the number of accepted tokens per round (τ - 1) over the accepted share of drafted tokens.
    """
    measured = profile.measured
    if not measured or not measured.accepted_fraction or measured.tau <= 1:
        return None
    return (measured.tau - 1) / measured.accepted_fraction


def speedup_from_counts(profile: Profile) -> float | None:
    """Return the speedup that a profile's counts and ratios predict; None if they are unknown.

    It is τ / (drafted tokens per round · β + v).
    """
    drafted, measured = drafted_per_round(profile), profile.measured
    if drafted is None or measured is None:
        return None
    if measured.beta is None or measured.verify_ratio is None:
        return None
    return measured.tau / (drafted * measured.beta + measured.verify_ratio)


def draw_token_times(profile: Profile | None) -> ReportFigure:
    """Draw milliseconds per token, plain and with the profile, with 95 % intervals.

    Raises: MissingData without a measured profile.
    """
    if profile is None:
        raise MissingData(PROFILE_MISSING)
    if profile.measured is None:
        raise MissingData(
            "This profile was imported and never measured: `skipsearch profile verify` measures it "
            "here."
        )
    measured = profile.measured
    bars = [
        ("plain decoding", measured.baseline_ms_per_token),
        ("with the profile", measured.ms_per_token),
    ]
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 1.7), layout="constrained")
        axes = figure.subplots()
        for k, (name, t) in enumerate(bars):
            axes.barh(
                [name],
                [t.mean],
                height=0.6,
                color=MUTED if k == 0 else GAIN,
                alpha=0.45,
                gid=f"bar-{k}",
            )
            axes.plot(
                [*t.ci95],
                [name, name],
                color=MUTED if k == 0 else GAIN,
                lw=2.4,
                gid=f"interval-{k}",
            )
            axes.annotate(
                f"{t.mean:g} ms", (t.ci95[1], k), (6, 0), textcoords="offset points", va="center"
            )
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(t.ci95[1] for _, t in bars))
        axes.set_xlabel("milliseconds a token on hold-out prompts, 95 % intervals")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    rows = [[name, f"{t.mean:g} ms", f"{t.ci95[0]:g}–{t.ci95[1]:g} ms"] for name, t in bars]
    rows.append(
        [
            "speedup",
            f"{measured.speedup.mean:g}×",
            f"{measured.speedup.ci95[0]:g}–{measured.speedup.ci95[1]:g}×",
        ]
    )
    return ReportFigure("times", figure, ("decoding", "a token", "95 %"), rows)


def draw_closed_form(profile: Profile | None) -> ReportFigure:
    """Draw the closed-form speedup over draft lengths at the profile's α, β and v.

    The measured speedup is drawn, too.

    Raises: MissingData without a measured profile of one skip drafter. Source: Leviathan et al.
    2023, theorem 3.8.
    """
    if profile is None:
        raise MissingData(PROFILE_MISSING)
    measured, drafted = profile.measured, drafted_per_round(profile)
    if (
        measured is None
        or measured.alpha is None
        or measured.beta is None
        or measured.verify_ratio is None
    ):
        raise MissingData(
            "This profile measured no draft, so it has no α, β and v to put into the closed form."
        )
    if profile.measured_recipe.shape != "skip":
        raise MissingData(
            "The closed form has one α and one β, so it is for recipes of one skip drafter. This "
            "profile drafts with "
            f"{profile.measured_recipe.shape}."
        )
    longest = profile.measured_recipe.drafters[0].draft_length
    lengths = range(1, max(MAX_DRAFT_SHOWN, longest) + 1)
    predicted = [
        expected_speedup(measured.alpha, g, measured.beta, measured.verify_ratio) for g in lengths
    ]
    low, high = measured.speedup.ci95
    x = drafted if drafted is not None else float(longest)
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.axhline(1, color=MUTED, lw=1, zorder=0)
        axes.plot(
            lengths,
            predicted,
            color=SERIES_COLOURS[1],
            marker="o",
            ms=3.5,
            lw=1.4,
            gid="closed-form",
            label=f"closed form: α {measured.alpha:g}, β {measured.beta:g}, "
            f"v {measured.verify_ratio:g}",
        )
        axes.vlines([x], [low], [high], color=SERIES_COLOURS[0], lw=2, gid="interval")
        axes.scatter(
            [x],
            [measured.speedup.mean],
            s=42,
            color=SERIES_COLOURS[0],
            edgecolors=PAPER,
            linewidths=0.6,
            zorder=3,
            gid="measured",
            label=f"measured, {x:.1f} tokens drafted a round",
        )
        axes.set_xlabel("tokens drafted a round")
        axes.set_ylabel("speedup")
        axes.set_xlim(left=0)
        figure.legend(loc="outside upper left", ncols=2)
    rows = [[str(g), as_speedup(s, 3)] for g, s in zip(lengths, predicted, strict=True)]
    rows.append(
        [f"measured: {x:.2f} a round", f"{as_speedup(measured.speedup.mean, 3)} ({low:g}–{high:g})"]
    )
    rows.append(
        [
            "α at which a draft of one token breaks even",
            f"{break_even_alpha(measured.beta, measured.verify_ratio):.2f}",
        ]
    )
    tip = f"measured {as_speedup(measured.speedup.mean)} ({low:g}–{high:g})"
    return ReportFigure(
        "closed-form", figure, ("tokens drafted a round", "speedup"), rows, {"measured": [tip]}
    )
