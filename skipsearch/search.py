"""The search itself: ask a searcher, judge its mask, tell it and the ledger, until budget, trials or ideas run out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from skipsearch.errors import SearchError
from skipsearch.evaluation.objectives import Objective
from skipsearch.exits import DraftPolicy
from skipsearch.ledger import Ledger
from skipsearch.mask import SkipMask
from skipsearch.searchers import Searcher, SearchProblem, make_searcher
from skipsearch.stats import Estimate, Trial, TrialState

SEEDS = {"sensitivity": 8, "middle": 6, "uniform": 6}


@dataclass(frozen=True)
class Stage:
    """A new part of the work begins."""

    title: str


@dataclass(frozen=True)
class Progress:
    """done of total in the current stage; judged and best during the search."""

    done: float
    total: float
    judged: Trial | None = None
    best: Trial | None = None


@dataclass(frozen=True)
class Raced:
    """One contender under real decoding. split: "calibration" or "holdout"."""

    mask: SkipMask
    policy: DraftPolicy
    predicted: float | None
    speedup: Estimate
    split: str

    def as_dict(self) -> dict[str, Any]:
        """For the study."""
        return {"attn": list(self.mask.attn), "mlp": list(self.mask.mlp), "policy": str(self.policy), "predicted": self.predicted,
                "speedup": {"mean": self.speedup.mean, "low": self.speedup.low, "high": self.speedup.high}, "split": self.split}


@dataclass(frozen=True)
class Noted:
    """Something worth knowing that is no step forward."""

    sentence: str


Event = Stage | Progress | Raced | Noted
Listener = Callable[[Event], None]


class Search:
    """Ask, judge, tell. seen: every judged mask, none of them twice."""

    def __init__(self, problem: SearchProblem, objective: Objective, ledger: Ledger | None, told: Iterable[Trial],
                 listen: Listener, started: float, limit: float | None, trials: int | None):
        self.problem, self.objective, self.ledger, self.listen = problem, objective, ledger, listen
        self.started, self.limit, self.trials = started, limit, trials
        # A failed trial that a killed process left behind is not a judgement: its mask may be asked for again.
        self.seen: dict[SkipMask, Trial] = {t.mask: t for t in told if t.state is TrialState.COMPLETE}

    def run(self, name: str) -> None:
        """Seed, then search until something runs out."""
        learner = make_searcher(name, self.problem)
        for trial in self.seen.values():
            learner.tell(trial)
        if name not in SEEDS and name != "auto":  # which has its own
            for seed_name, count in SEEDS.items():
                self._drive(seed_name, make_searcher(seed_name, self.problem), count, [learner])
        self._drive(name, learner, None, [])
        if not self.finalists(1):
            raise SearchError("no mask could be judged before the budget ran out: give it more time (--budget) or trials")

    def finalists(self, count: int) -> list[Trial]:
        """The best judged masks, by ratio to the baseline of their own process: a resumed search may run on a slower day."""
        judged = [t for t in self.seen.values() if t.state is TrialState.COMPLETE and math.isfinite(t.seconds_per_token)]
        return sorted(judged, key=lambda t: (-(t.speedup or 0.0), t.seconds_per_token))[:count]

    def _drive(self, name: str, searcher: Searcher, most: int | None, listeners: Iterable[Searcher]) -> None:
        asked = 0
        while (most is None or asked < most) and not self._spent():
            began = perf_counter()
            mask = searcher.ask()
            if mask is None:
                return
            asked += 1
            known = self.seen.get(mask)
            trial = known or self._judge(mask, getattr(searcher, "proposer", name), began)
            searcher.tell(trial)
            if known is None:
                for other in listeners:
                    other.tell(trial)

    def _judge(self, mask: SkipMask, proposer: str, began: float) -> Trial:
        cheap = self.objective.fidelity == "replay"
        number = self.ledger.claim(mask) if self.ledger and not cheap else None
        trial = replace(self.objective.judge(mask)[0], searcher=proposer, search_seconds=perf_counter() - began)
        if self.ledger and number is not None:
            self.ledger.finish(number, trial)
        elif self.ledger:
            self.ledger.add(trial)
        self.seen[mask] = trial
        by_time = (perf_counter() - self.started, self.limit) if self.limit else (0.0, 1.0)
        by_count = (float(len(self.seen)), float(self.trials)) if self.trials else (0.0, 1.0)
        spent, total = max(by_time, by_count, key=lambda pair: pair[0] / pair[1])
        self.listen(Progress(spent, total, trial, next(iter(self.finalists(1)), None)))
        return trial

    def _spent(self) -> bool:
        """The first mask is always judged: a search that judged nothing has no answer."""
        if not self.seen:
            return False
        over_time = self.limit is not None and perf_counter() - self.started >= self.limit
        return over_time or (self.trials is not None and len(self.seen) >= self.trials)
