"""The figure of a profile's times, and the speedup that its counts predict."""

from __future__ import annotations

from skipsearch.profile import Profile
from skipsearch.report.figure import MissingData, ReportFigure
from skipsearch.report.theme import GAIN, MUTED, themed_figure

PROFILE_MISSING = "It needs a profile: give one with --profile."


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
