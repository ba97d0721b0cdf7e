"""Show the progress of long work: what it is, how far it is and how long it will still take.

A line fits a terminal of 80 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
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
