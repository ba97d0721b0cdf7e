"""A process that shares a search with others: its name, the signs of life it gives while it measures, and what it hears of the others."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

from optuna.storages import BaseStorage

from skipsearch import storage
from skipsearch.mask import SkipMask
from skipsearch.stats import Trial


def worker_name() -> str:
    """Host and process, as people find it in the study."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class News:
    """What a study says that it did not say before. judged: since the last news, by whomever; pending: being measured by others now;
    lost: masks whose measurement was broken off, to be measured by anyone."""

    judged: tuple[Trial, ...] = ()
    pending: frozenset[SkipMask] = frozenset()
    lost: tuple[SkipMask, ...] = ()


class Heartbeat:
    """A thread that says again and again that this process is still at its trial; Optuna's own runs inside `study.optimize` alone."""

    def __init__(self, where: BaseStorage, trial_id: int):
        self._record = partial(where.record_heartbeat, trial_id)
        self._record()
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(storage.HEARTBEAT_SECONDS):
            with suppress(Exception):  # a server that is away may come back; if it does not, the outcome cannot be recorded either
                self._record()
