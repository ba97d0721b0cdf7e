"""Show the progress of long work: what it is, how far it is and how long it will still take.

A line fits a terminal of 80 columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

BEAT_S = 20.0  # seconds without a line, after which a pipe gets one


def format_duration(seconds: float) -> str:
    """Return `4 s`, `2 min`, `1 h 5 min`."""
    whole = max(1, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class SilenceTimer:
    """A timer that calls `beat` from its own thread if no line was written for `seconds`.

    `beat` prints a line about the progress. Without it, long work looks like a hang.
    """

    def __init__(self, beat: Callable[[], None], seconds: float = BEAT_S):
        self._beat, self._seconds = beat, seconds
        self._latest, self._ended = monotonic(), Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._latest = monotonic()
        self._thread.start()

    def written(self) -> None:
        """Restart the timer, because a line was just written."""
        self._latest = monotonic()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(max(0.0, self._latest + self._seconds - monotonic())):
            if monotonic() >= self._latest + self._seconds:
                self.written()
                self._beat()


class TimeColumn(ProgressColumn):
    """A column that shows `4 s left` during the work and `took 7 s` after it."""

    max_refresh = 0.5

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True, min_width=13))

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"took {format_duration(task.finished_time or 0)}", style="dim")
        left = task.time_remaining
        return Text("" if left is None else f"{format_duration(left)} left")


class ProgressBar(Progress):
    """A progress bar, which only a terminal shows.

    transient: remove it when the work is done.
    """

    def __init__(self, console: Console, transient: bool = True):
        super().__init__(
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            BarColumn(bar_width=10),
            TextColumn("{task.percentage:>3.0f}%", table_column=Column(no_wrap=True, min_width=4)),
            TimeColumn(),
            console=console,
            transient=transient,
            expand=True,
            disable=not console.is_terminal or console.quiet,
        )


class StageView:
    """Shows long work that has several stages.

    A terminal gets a live bar for each stage. A pipe gets a line for each stage, and a progress
    line after `beat_s` seconds without any other.
    """

    interruption: ClassVar[str]  # what is said after Ctrl-C

    def __init__(self, console: Console, beat_s: float = BEAT_S):
        self.console, self.is_live = console, console.is_terminal
        self.heartbeat = SilenceTimer(self._say_how_far, beat_s)
        self.bar = ProgressBar(console, transient=False)
        self.stage: TaskID | None = None
        self.title = ""

    def __enter__(self) -> Self:
        self.bar.start()
        if not self.is_live:
            self.heartbeat.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.heartbeat.stop()
        self.bar.stop()
        if isinstance(error, KeyboardInterrupt):
            self.console.print(self.interruption)

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line, and restart the wait for the next progress line."""
        self.heartbeat.written()
        self.console.print(line, style=style)

    def start_stage(self, title: str) -> None:
        """Complete the bar of the current stage, and begin the next one."""
        if self.stage is not None:
            total = self._task().total or 1
            self.bar.update(self.stage, total=total, completed=total, description=self.title)
        self.stage, self.title = self.bar.add_task(title, total=None), title
        if not self.is_live:
            self.say(title)

    def update_stage(self, done: float, total: float, description: str | None = None) -> None:
        """Show how far the current stage is. description: shown for its title."""
        if self.stage is not None:
            self.bar.update(
                self.stage,
                completed=min(done, total),
                total=total,
                description=description or self.title,
            )

    def _task(self) -> Task:
        assert self.stage is not None
        return self.bar.tasks[self.bar.task_ids.index(self.stage)]

    def _say_how_far(self) -> None:
        """Print one line about the progress. The thread of the `SilenceTimer` calls this."""
        if self.stage is None:
            return
        task = self._task()
        remaining_s = task.time_remaining
        about = f", about {format_duration(remaining_s)} left" if remaining_s else ""
        stage = re.split(r" \(|:", self.title)[0]
        self.console.print(f"  {stage}: {task.percentage:.0f} %{about}", style="dim")
