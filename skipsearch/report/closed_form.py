"""Figures of a profile: its times, and what α, β and v alone would predict of it."""

from __future__ import annotations

from skipsearch.profile import Profile
from skipsearch.report.drawn import Drawn, NothingToDraw, times
from skipsearch.report.theme import GAIN, MUTED, PAPER, SERIES, style
from skipsearch.stats import break_even_alpha, expected_speedup

NO_PROFILE = "It needs a profile: give one with --profile."
LONGEST_DRAFT = 16


def drafted_per_round(profile: Profile) -> float | None:
    """Mean tokens drafted in a round: accepted a round (τ − 1) over the accepted share of the drafted; None if that is unknown."""
    found = profile.measured
    return (found.tau - 1) / found.accepted_fraction if found and found.accepted_fraction and found.tau > 1 else None


def by_counts(profile: Profile) -> float | None:
    """The speedup that a profile's own counts and ratios come to: τ / (drafted a round · β + v); None if they are not known."""
    drafted, found = drafted_per_round(profile), profile.measured
    if drafted is None or found is None or found.beta is None or found.verify_ratio is None:
        return None
    return found.tau / (drafted * found.beta + found.verify_ratio)


def token_times(profile: Profile | None) -> Drawn:
    """Milliseconds a token, plain and with the profile, with 95 % intervals. Raises: NothingToDraw without a measured profile."""
    if profile is None:
        raise NothingToDraw(NO_PROFILE)
    if profile.measured is None:
        raise NothingToDraw("This profile was imported and never measured: `skipsearch profile verify` measures it here.")
    found = profile.measured
    bars = [("plain decoding", found.baseline_ms_per_token), ("with the profile", found.ms_per_token)]
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 1.7), layout="constrained")
        axes = figure.subplots()
        for k, (name, t) in enumerate(bars):
            axes.barh([name], [t.mean], height=0.6, color=MUTED if k == 0 else GAIN, alpha=0.45, gid=f"bar-{k}")
            axes.plot([*t.ci95], [name, name], color=MUTED if k == 0 else GAIN, lw=2.4, gid=f"interval-{k}")
            axes.annotate(f"{t.mean:g} ms", (t.ci95[1], k), (6, 0), textcoords="offset points", va="center")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(t.ci95[1] for _, t in bars))
        axes.set_xlabel("milliseconds a token on hold-out prompts, 95 % intervals")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    rows = [[name, f"{t.mean:g} ms", f"{t.ci95[0]:g}–{t.ci95[1]:g} ms"] for name, t in bars]
    rows.append(["speedup", f"{found.speedup.mean:g}×", f"{found.speedup.ci95[0]:g}–{found.speedup.ci95[1]:g}×"])
    return Drawn("times", figure, ("decoding", "a token", "95 %"), rows)


def closed_form(profile: Profile | None) -> Drawn:
    """The closed form over draft lengths at the profile's α, β and v, beside what was measured.

    Raises: NothingToDraw without a measured profile of one skip drafter. Source: Leviathan et al. 2023, theorem 3.8.
    """
    if profile is None:
        raise NothingToDraw(NO_PROFILE)
    found, drafted = profile.measured, drafted_per_round(profile)
    if found is None or found.alpha is None or found.beta is None or found.verify_ratio is None:
        raise NothingToDraw("This profile measured no draft, so it has no α, β and v to put into the closed form.")
    if profile.candidate.shape != "skip":
        raise NothingToDraw("The closed form has one α and one β, so it is for recipes of one skip drafter. This profile drafts with "
                            f"{profile.candidate.shape}.")
    longest = profile.candidate.drafters[0].draft_length
    lengths = range(1, max(LONGEST_DRAFT, longest) + 1)
    predicted = [expected_speedup(found.alpha, g, found.beta, found.verify_ratio) for g in lengths]
    low, high = found.speedup.ci95
    at = drafted if drafted is not None else float(longest)
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.axhline(1, color=MUTED, lw=1, zorder=0)
        axes.plot(lengths, predicted, color=SERIES[1], marker="o", ms=3.5, lw=1.4, gid="closed-form",
                  label=f"closed form: α {found.alpha:g}, β {found.beta:g}, v {found.verify_ratio:g}")
        axes.vlines([at], [low], [high], color=SERIES[0], lw=2, gid="interval")
        axes.scatter([at], [found.speedup.mean], s=42, color=SERIES[0], edgecolors=PAPER, linewidths=0.6, zorder=3, gid="measured",
                     label=f"measured, {at:.1f} tokens drafted a round")
        axes.set_xlabel("tokens drafted a round")
        axes.set_ylabel("speedup")
        axes.set_xlim(left=0)
        figure.legend(loc="outside upper left", ncols=2)
    rows = [[str(g), times(s, 3)] for g, s in zip(lengths, predicted, strict=True)]
    rows.append([f"measured: {at:.2f} a round", f"{times(found.speedup.mean, 3)} ({low:g}–{high:g})"])
    rows.append(["α at which a draft of one token breaks even", f"{break_even_alpha(found.beta, found.verify_ratio):.2f}"])
    tip = f"measured {times(found.speedup.mean)} ({low:g}–{high:g})"
    return Drawn("closed-form", figure, ("tokens drafted a round", "speedup"), rows, {"measured": [tip]})
