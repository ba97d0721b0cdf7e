"""A process that shares a search with others: its name, its heartbeat, what it reads."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

from optuna.storages import BaseStorage

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.tuning import storage


def worker_name() -> str:
    """Return host and process id, which a study shows for each trial."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class StudyUpdate:
    """What is new in a study since the last look."""

    judged: tuple[Trial, ...] = ()  # by any worker
    pending: frozenset[SkipMask] = frozenset()  # masks that others are measuring now
    orphaned: tuple[SkipMask, ...] = ()  # masks whose measurement was cut off; anyone may measure


class Heartbeat:
    """A thread that keeps recording that this process is alive and at its trial.

    Optuna's own heartbeat runs inside `study.optimize` alone.
    """

    def __init__(self, storage_backend: BaseStorage, trial_id: int):
        self._record = partial(storage_backend.record_heartbeat, trial_id)
        self._record()
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(storage.HEARTBEAT_S):
            # A lost server may come back. If it does not, the outcome cannot be recorded either.
            with suppress(Exception):
                self._record()
