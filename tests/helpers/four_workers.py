"""Four processes that search together, forked from one that has imported everything: `python
four_workers.py URL FOLDER`.

Each opens the study and looks at it before any of them proposes a mask, so that all four propose
the same one first. The `victim` measures its first mask for ever, the `slow` one until there is a
file FOLDER/go; nobody ends a measurement before there is FOLDER/held. What each measures is a line
of FOLDER/measured, written before the measurement: `worker bits`."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from searchers.toy import ToyModel
from tuning.test_study import IDENTITY

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.tuning import storage
from skipsearch.tuning.search_loop import Search
from skipsearch.tuning.study import StudyStore
from skipsearch.tuning.workers import worker_name

WORKERS, TRIALS, LAYERS = 4, 24, 3
TOY = ToyModel.random(LAYERS)


class SlowObjective:
    """Takes a while over a mask, as `role` has it."""

    fidelity = "wall"

    def __init__(self, role: str, folder: Path):
        self.role, self.folder = role, folder

    def judge(self, mask: SkipMask) -> Trial:
        with (self.folder / "measured").open("a") as log:  # one short line is appended whole
            log.write(f"{worker_name()} {''.join(map(str, mask.bits))}\n")
        for awaited in {"victim": ["never"], "slow": ["held", "go"]}.get(self.role, ["held"]):
            while not (self.folder / awaited).exists():
                sleep(0.01)
        sleep(0.05)
        return TOY.trial(mask, "wall")


def run_worker(role: str, seed: int, url: str, folder: Path, barrier: Barrier) -> None:
    storage.HEARTBEAT_S, storage.GRACE_S = 1, 8
    barrier.wait()
    ledger = StudyStore(url, IDENTITY)
    news = ledger.poll

    def first_news() -> Any:
        answer = news()
        ledger.poll = news  # type: ignore[method-assign]
        barrier.wait()
        return answer

    ledger.poll = first_news  # type: ignore[method-assign]
    search = Search(
        TOY.problem(seed),
        SlowObjective(role, folder),
        ledger,
        ledger.trials(),
        lambda event: None,
        perf_counter(),
        None,
        TRIALS,
    )
    search.run("random")
    (folder / f"{role}.json").write_text(
        json.dumps([len(search.judged_trials), search.best_trials(1)[0].mask.bits])
    )


def main(url: str, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    together = context.Barrier(WORKERS)
    roles = {"victim": 0, "slow": 1, "third": 0, "fourth": 1}
    workers = [
        context.Process(target=run_worker, args=(role, seed, url, folder, together))
        for role, seed in roles.items()
    ]
    for worker in workers:
        worker.start()
    host = worker_name().rpartition(":")[0]
    print(
        json.dumps(
            {role: f"{host}:{worker.pid}" for role, worker in zip(roles, workers, strict=True)}
        ),
        flush=True,
    )
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers[1:]))


if __name__ == "__main__":
    os.setsid()  # one group, so that a test that fails leaves none of them behind
    main(sys.argv[1], Path(sys.argv[2]))
