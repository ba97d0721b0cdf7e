"""What a person sees of a search: stages with a bar and the time left, the best mask so far, the final race, the verdict."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.progress import TaskID
from rich.table import Table

from skipsearch.cli.common import called
from skipsearch.cli.outside import Terminal
from skipsearch.cli.progress import Bar
from skipsearch.profile import Profile
from skipsearch.profile.describe import brought, legend
from skipsearch.profile.draw import draw_mask
from skipsearch.search import Event, Noted, Progress, Raced, Stage, ToBeat
from skipsearch.stats import Trial

WORTH = 1.01   # times a speedup: a smaller gain is not worth a line, nor a mask behind lookup
RACE_SHOWN = 2   # recipes of a race: with more, the end of a search no longer fits a screen


class TuneView:
    """Listens to `tune`. A terminal gets a live bar a stage; a pipe gets a line a stage and one for each new best mask
    that is measurably better than the last one told, and than lookup alone."""

    def __init__(self, console: Terminal):
        self.console = console
        self.live = console.is_terminal
        self.bar = Bar(console, transient=False)
        self.stage: TaskID | None = None
        self.title = ""
        self.best: Trial | None = None
        self.judged = 0
        self.to_beat, self.told = 0.0, 0.0
        self.raced: list[Raced] = []
        self.doubtful = False

    def __enter__(self) -> TuneView:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()
        if isinstance(error, KeyboardInterrupt):
            self.console.print("interrupted; every finished trial is kept, the same command with --resume goes on")

    def __call__(self, event: Event) -> None:
        match event:
            case Stage(title):
                self._close()
                self.stage, self.title = self.bar.add_task(title, total=None), title
                if not self.live:
                    self.console.print(title)
            case Progress(done, total, judged, best):
                if judged is not None and best is not None:
                    self.judged += 1
                    self._judged(best)
                if self.stage is not None:   # the best so far belongs to the search, and not to the stages behind it
                    said = self.title if judged is None else f"trial {self.judged}, {self._found()}"
                    self.bar.update(self.stage, completed=min(done, total), total=total, description=said)
            case ToBeat(speedup):
                self.to_beat = WORTH * speedup
            case Noted(sentence, doubtful):
                self.doubtful |= doubtful
                self.console.print(sentence, style="dim")
            case Raced():
                self.raced.append(event)

    def _close(self) -> None:
        if self.stage is not None:
            task = self.bar.tasks[self.bar.task_ids.index(self.stage)]
            self.bar.update(self.stage, total=task.total or 1, completed=task.total or 1, description=self.title)

    def _judged(self, best: Trial) -> None:
        if self.best is None or best.mask != self.best.mask:
            self.best = best
            if not self.live and self._worth_telling() and (best.speedup or 0.0) >= WORTH * self.told:
                self.told = best.speedup or 0.0
                self.console.print(f"  trial {self.judged}: best predicted so far {_trial(best)} of {2 * best.mask.n_layers}"
                                   f"{f', by {best.searcher}' if best.searcher else ''}")

    def _worth_telling(self) -> bool:
        return self.best is not None and (self.best.speedup or 0.0) > self.to_beat

    def _found(self) -> str:
        return f"best predicted {_trial(self.best)}" if self._worth_telling() or not self.to_beat else "no mask better than lookup alone"

    def summary(self, console: Terminal, profile: Profile, path: Path) -> None:
        """The race, the mask where there is one, what each drafter brought, the verdict on hold-out prompts, and what to do with it."""
        calibrated = [r for r in self.raced if r.split == "calibration"]   # the verdict says what hold-out prompts said
        self._race(console, sorted(calibrated, key=lambda r: (r.recipe != profile.candidate, -r.prompts, -r.speedup.mean)))
        if self.to_beat and not self._worth_telling():
            console.print("no skip mask was predicted to be faster than lookup alone", style="dim")
        if profile.mask.n_skipped:
            console.print(draw_mask(profile.mask))
        measured = profile.measured
        assert measured is not None
        console.print(f"on {measured.prompts} hold-out prompts: {measured.baseline_ms_per_token.in_words(' ms')} a token plain, "
                      f"{measured.ms_per_token.in_words(' ms')} with this profile")
        if len(measured.by_drafter) > 1:
            for counts in measured.by_drafter:
                console.print(f"{counts.kind}: {brought(counts)}")
        lossless = measured.lossless
        identical = f"; tokens identical on {lossless.identical} of {lossless.prompts} prompts" if lossless.prompts else ""
        won = [r for r in calibrated if r.recipe == profile.candidate]
        if won and not self.doubtful and won[0].speedup.low > measured.speedup.ci95[1]:
            console.print(f"on calibration prompts it measured {won[0].speedup.mean:.2f}×: part of that does not carry over to text "
                          "that the search has not seen")
        if profile.verdict == "speculate":
            console.print(f"[bold green]speculate[/]: {measured.speedup.in_words('×')} as fast as plain decoding{identical}", markup=True)
        else:
            console.print(f"[bold yellow]plain[/]: nothing beat plain decoding beyond doubt here; the best recipe measured "
                          f"{measured.speedup.in_words('×')}, and this profile decodes plainly{identical}", markup=True)
        if self.doubtful:
            console.print("[yellow]this was measured on a machine that was busy with something else[/]: tune again on a quiet one before "
                          "you share it", markup=True)
        if profile.verdict == "speculate":
            console.print(f"written to {path}")
            console.print(f"next: {called()} decode --profile {path} --prompt '…' --check")
        else:
            console.print(f"written to {path}; what may help: more prompts, a quiet machine, or a trained draft (`skipsearch train`, then "
                          "tune with --modules)")

    def _race(self, console: Terminal, raced: list[Raced]) -> None:
        """The chosen one first, and those that came closest to it."""
        if not raced:
            return
        table = Table("", "recipe", "predicted", "measured (95 %)", "prompts", box=None, pad_edge=False)
        for i, r in enumerate(raced[:RACE_SHOWN]):
            table.add_row("" if i else "→", str(r.recipe), f"{r.predicted:.2f}×" if r.predicted else "",
                          f"{r.speedup.mean:.2f}× ({r.speedup.low:.2f}–{r.speedup.high:.2f})", str(r.prompts))
        console.print(table)
        more = f"; {len(raced) - RACE_SHOWN} more raced, which `skipsearch report` shows" if len(raced) > RACE_SHOWN else ""
        doubt = "; predictions are unreliable on a busy machine" if self.doubtful else ""
        console.print(f"→ chosen{more}{doubt}", style="dim")
        for line in legend([str(r.recipe) for r in raced[:RACE_SHOWN]], console.width):
            console.print(line, style="dim")


def _trial(trial: Trial | None) -> str:
    if trial is None or trial.speedup is None:
        return "none"
    alpha = f", α {trial.alpha:.2f}" if trial.alpha is not None else ""
    return f"{trial.speedup:.2f}×{alpha}, skips {trial.mask.n_skipped}"
