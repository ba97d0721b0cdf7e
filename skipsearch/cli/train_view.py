"""What a person sees of a training: stages with a bar, loss, agreement and the time left."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from skipsearch.cli.outside import Terminal
from skipsearch.modules.trainer import Step
from skipsearch.search import Noted, Progress, Stage
from skipsearch.training import Event

LINE_EVERY = 0.1   # of a training, where the output is no terminal


class TrainView:
    """Listens to `train`. A terminal gets a live bar a stage; a pipe gets a line a stage and one for each tenth of the training."""

    def __init__(self, console: Terminal, silent: bool = False):
        self.console, self.live, self.silent = console, console.is_terminal and not silent, silent
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"),
                   TimeElapsedColumn(), TextColumn("{task.fields[note]}", markup=False))
        self.bar = Bar(*columns, console=console, disable=not self.live)
        self.stage: TaskID | None = None
        self.told = 0.0

    def __enter__(self) -> TrainView:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()
        if isinstance(error, KeyboardInterrupt) and not self.silent:
            self.console.print("interrupted; the same command goes on from the last checkpoint, half a minute old at most")

    def __call__(self, event: Event) -> None:
        if self.silent:
            return
        match event:
            case Stage(title):
                self.stage = self.bar.add_task(title, total=None, note="")
                if not self.live:
                    self.console.print(title)
            case Progress(done, total):
                if self.stage is not None:
                    self.bar.update(self.stage, completed=done, total=total)
            case Noted(sentence):
                self.console.print(sentence, style="dim")
            case Step():
                self._step(event)

    def _step(self, step: Step) -> None:
        note = f"step {step.done}: loss {step.loss:.3f}, agreement {step.agreement:.3f}, {step.left:.0f} s left"
        if self.stage is not None:
            self.bar.update(self.stage, completed=step.share, total=1.0, note=note)
        if not self.live and step.share >= self.told + LINE_EVERY:
            self.told = step.share
            self.console.print(f"  {note}")
