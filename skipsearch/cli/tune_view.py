"""Show a search: its stages with a progress bar and the time left, and what it finds.

What it finds is the best mask so far, the race and the verdict.
"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from skipsearch.cli.consoles import program_name
from skipsearch.cli.progress import BEAT_S, StageView, format_duration
from skipsearch.cli.terminal import Terminal
from skipsearch.core.stats import Trial
from skipsearch.profile import Profile
from skipsearch.profile.show import (
    describe_prompts,
    describe_request_speedup,
    draw_mask,
    explain_terms,
    format_counts,
)
from skipsearch.tuning.events import (
    BaselinePredicted,
    CandidateMeasured,
    Forecast,
    LongestDecoding,
    Notice,
    StageProgress,
    StageStarted,
    TuneEvent,
)

MIN_REPORTED_GAIN = 1.01  # ratio of two speedups; a smaller gain gets no line
FEW_MASKS = 20  # so few judged masks get a line
MAX_RACE_ROWS = 2  # recipes of a race; with more, the summary does not fit a screen


class TuneView(StageView):
    """A listener of `tune` that prints its events.

    A pipe also gets a line for a new best mask, if it is measurably better than the last one that
    was printed, and better than lookup alone.
    """

    interruption = (
        "interrupted; every judged mask is kept, and the same command with --resume continues "
        "after it has prepared again"
    )

    def __init__(self, console: Terminal, beat_s: float = BEAT_S):
        super().__init__(console, beat_s)
        self.best: Trial | None = None
        self.n_judged = 0
        self.baseline_speedup, self.last_reported = 0.0, 0.0
        self.race: list[CandidateMeasured] = []
        self.casts_doubt = False

    def __call__(self, event: TuneEvent) -> None:
        match event:
            case StageStarted(title):
                self.start_stage(title)
            case StageProgress(done, total, None):
                self.update_stage(done, total)
            case StageProgress(done, total, _, best):
                if best is not None:
                    self.n_judged += 1
                    self._show_best(best)
                self.update_stage(done, total, f"trial {self.n_judged}, {self._best_text()}")
            case BaselinePredicted(speedup):
                self.baseline_speedup = MIN_REPORTED_GAIN * speedup
            case Notice(sentence, doubtful):
                self.casts_doubt |= doubtful
                self.say(sentence, style="dim")
            case LongestDecoding():
                self.say(_describe_longest(event), style="dim")
            case Forecast():
                self.say(_forecast(event), style="dim")
            case CandidateMeasured():
                self.race.append(event)

    def _show_best(self, best: Trial) -> None:
        """Remember a new best mask, and print it on a pipe if it is worth a line."""
        if self.best is None or best.mask != self.best.mask:
            self.best = best
            if (
                not self.is_live
                and self._is_worth_reporting()
                and (best.speedup or 0.0) >= MIN_REPORTED_GAIN * self.last_reported
            ):
                self.last_reported = best.speedup or 0.0
                reading = best.recipe.drafters[-1].format_reading() if best.recipe else ""
                proposer = f", by {best.searcher}" if best.searcher else ""
                self.say(
                    f"  trial {self.n_judged}: best predicted so far {_describe_trial(best)} of "
                    f"{2 * best.mask.n_layers}{reading}{proposer}"
                )

    def _is_worth_reporting(self) -> bool:
        return self.best is not None and (self.best.speedup or 0.0) > self.baseline_speedup

    def _best_text(self) -> str:
        return (
            f"best predicted {_describe_trial(self.best)}"
            if self._is_worth_reporting() or not self.baseline_speedup
            else "no mask better than lookup alone"
        )

    def print_summary(self, console: Terminal, profile: Profile, path: Path) -> None:
        """Print the result of a search.

        These are the race, the mask, what each drafter contributed, the verdict on hold-out
        prompts, and the next command.
        """
        # The verdict below has the result on hold-out prompts.
        calibrated = [r for r in self.race if r.split == "calibration"]
        self._print_race(
            console,
            sorted(
                calibrated,
                key=lambda r: (r.recipe != profile.measured_recipe, -r.n_prompts, -r.speedup.mean),
            ),
        )
        n_masks = profile.provenance.trials
        if n_masks is not None and n_masks < FEW_MASKS:
            console.print(
                f"{n_masks} mask{'s' if n_masks > 1 else ''} judged: a longer --budget may find "
                "better ones",
                style="dim",
            )
        has_skip = "skip" in profile.measured_recipe.shape.split(",")
        if self.baseline_speedup and not self._is_worth_reporting() and not has_skip:
            console.print("no skip mask was predicted to be faster than lookup alone", style="dim")
        if profile.mask.n_skipped:
            console.print(draw_mask(profile.mask))
        measured = profile.measured
        assert measured is not None
        console.print(
            f"on {describe_prompts(measured)}: "
            f"{measured.baseline_ms_per_token.format_with_unit(' ms')} a token plain, "
            f"{measured.ms_per_token.format_with_unit(' ms')} with this profile"
        )
        if len(measured.by_drafter) > 1:
            for counts in measured.by_drafter:
                console.print(f"{counts.kind}: {format_counts(counts)}")
        lossless = measured.lossless
        identical = (
            f"; tokens identical on {lossless.identical} of {lossless.prompts} prompts"
            if lossless.prompts
            else ""
        )
        won = [r for r in calibrated if r.recipe == profile.measured_recipe]
        if won and not self.casts_doubt and won[0].speedup.low > measured.speedup.ci95[1]:
            console.print(
                f"on calibration prompts it measured {won[0].speedup.mean:.2f}×: part of that does "
                "not carry over to text "
                "that the search has not seen"
            )
        if profile.verdict == "speculate":
            console.print(
                f"[bold green]speculate[/]: {measured.speedup.format_with_unit('×')} as fast as "
                f"plain decoding{describe_request_speedup(measured)}{identical}",
                markup=True,
            )
        else:
            console.print(
                "[bold yellow]plain[/]: nothing beat plain decoding beyond doubt here; the best "
                "recipe measured "
                f"{measured.speedup.format_with_unit('×')}, and this profile decodes "
                f"plainly{identical}",
                markup=True,
            )
        if self.casts_doubt:
            console.print(
                "[yellow]this was measured on a machine that was busy with something else[/]: tune "
                "again on a quiet one before "
                "you share it",
                markup=True,
            )
        if profile.verdict == "speculate":
            console.print(f"written to {path}")
            console.print(f"next: {program_name()} decode --profile {path} --prompt '…' --check")
        else:
            console.print(
                f"written to {path}; what may help: more prompts, a quiet machine, or a trained "
                "draft (`skipsearch train`, then "
                "tune with --modules)"
            )

    def _print_race(self, console: Terminal, raced: list[CandidateMeasured]) -> None:
        """Print the chosen recipe first, and then the recipes that were nearly as fast."""
        if not raced:
            return
        table = Table(
            "", "recipe", "predicted", "measured (95 %)", "prompts", box=None, pad_edge=False
        )
        for i, r in enumerate(raced[:MAX_RACE_ROWS]):
            table.add_row(
                "" if i else "→",
                str(r.recipe),
                f"{r.predicted_speedup:.2f}×" if r.predicted_speedup else "",
                _format_raced(r),
                str(r.n_prompts),
            )
        console.print(table)
        more = (
            f"; {len(raced) - MAX_RACE_ROWS} more raced, which `skipsearch report` shows"
            if len(raced) > MAX_RACE_ROWS
            else ""
        )
        doubt = "; predictions are unreliable on a busy machine" if self.casts_doubt else ""
        console.print(f"→ chosen{more}{doubt}", style="dim")
        for line in explain_terms([str(r.recipe) for r in raced[:MAX_RACE_ROWS]], console.width):
            console.print(line, style="dim")


def _format_raced(raced: CandidateMeasured) -> str:
    """Return the measured speedup, with the interval if prompts suffice for one."""
    from skipsearch.timing.elimination import MIN_COMPARED_PROMPTS

    interval = f" ({raced.speedup.low:.2f}–{raced.speedup.high:.2f})"
    return f"{raced.speedup.mean:.2f}×{interval if raced.n_prompts >= MIN_COMPARED_PROMPTS else ''}"


def _describe_longest(longest: LongestDecoding) -> str:
    return (
        f"a token takes {1e3 * longest.token_s:.3g} ms: race and final measurement take at most "
        f"about {format_duration(longest.total_s)} ({longest.n_texts} texts of up to "
        f"{longest.n_tokens} tokens), after the preparation and the search"
    )


def _forecast(forecast: Forecast) -> str:
    prepared = format_duration(forecast.prepared_s)
    rest = f"about {format_duration(forecast.decode_s)} for race and final measurement"
    if forecast.refine_s:
        refining = format_duration(forecast.refine_s)
        rest = f"about {refining} for trying the best masks with every setting, {rest}"
    if forecast.search_s is None:
        return f"preparation took {prepared}; what follows: the time for judging masks, {rest}"
    seconds = forecast.prepared_s + forecast.search_s + forecast.refine_s + forecast.decode_s
    judging = (
        f"{format_duration(forecast.search_s)} for judging masks, " if forecast.search_s else ""
    )
    return f"about {format_duration(seconds)} in all: {prepared} for preparation, {judging}{rest}"


def _describe_trial(trial: Trial | None) -> str:
    if trial is None or trial.speedup is None:
        return "none"
    alpha = f", α {trial.alpha:.2f}" if trial.alpha is not None else ""
    return f"{trial.speedup:.2f}×{alpha}, skips {trial.mask.n_skipped}"
