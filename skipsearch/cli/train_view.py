"""Show a training: stages with a progress bar, loss, agreement and the time left."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from skipsearch.cli.terminal import Terminal
from skipsearch.training.driver import TrainEvent
from skipsearch.training.trainer import TrainProgress
from skipsearch.tuning.events import Notice, StageProgress, StageStarted

LINE_INTERVAL = 0.1  # fraction of the training between two lines on a pipe


class TrainView:
    """A listener of `train` that prints its events.

    A terminal gets a live bar for each stage. A pipe gets a line for each stage and for each tenth
    of the training.
    """

    def __init__(self, console: Terminal):
        self.console, self.is_live = console, console.is_terminal
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self.bar = Bar(*columns, console=console, disable=not self.is_live)
        self.stage: TaskID | None = None
        self.last_reported = 0.0

    def __enter__(self) -> TrainView:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()
        if isinstance(error, KeyboardInterrupt):
            self.console.print(
                "interrupted; the same command continues from the last checkpoint, half a minute "
                "old at most"
            )

    def __call__(self, event: TrainEvent) -> None:
        match event:
            case StageStarted(title):
                self.stage = self.bar.add_task(title, total=None, note="")
                if not self.is_live:
                    self.console.print(title)
            case StageProgress(done, total):
                if self.stage is not None:
                    self.bar.update(self.stage, completed=done, total=total)
            case Notice(sentence):
                self.console.print(sentence, style="dim")
            case TrainProgress():
                self._show_step(event)

    def _show_step(self, step: TrainProgress) -> None:
        note = (
            f"step {step.n_steps}: loss {step.loss:.3f}, agreement {step.agreement:.3f}, "
            f"{step.seconds_left:.0f} s left"
        )
        if self.stage is not None:
            self.bar.update(self.stage, completed=step.share_done, total=1.0, note=note)
        if not self.is_live and step.share_done >= self.last_reported + LINE_INTERVAL:
            self.last_reported = step.share_done
            self.console.print(f"  {note}")
