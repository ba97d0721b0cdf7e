"""A worker, which shares a search with other processes: its name, heartbeat and updates."""

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
    """Return "host:process id", by which a study names the worker of each trial."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class StudyUpdate:
    """The changes of a study since the last poll."""

    judged: tuple[Trial, ...] = ()  # by any worker
    pending: frozenset[SkipMask] = frozenset()  # masks that other workers are measuring
    orphaned: tuple[SkipMask, ...] = ()  # masks whose measurement was interrupted


class Heartbeat:
    """A thread that regularly records in the study that this process is still measuring its trial.

    Optuna's own heartbeat runs only inside `study.optimize`.
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
            # The server may come back. If it does not, `StudyStore.finish` raises the error.
            with suppress(Exception):
                self._record()
