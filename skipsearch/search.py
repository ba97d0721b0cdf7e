"""The search itself: ask a searcher, judge its mask, tell it and the ledger, until budget, trials or ideas run out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter, sleep
from typing import Any

from skipsearch.errors import SearchError
from skipsearch.evaluation.objectives import Objective
from skipsearch.ledger import Ledger
from skipsearch.mask import SkipMask
from skipsearch.recipe import Recipe
from skipsearch.searchers import Searcher, SearchProblem, make_searcher
from skipsearch.stats import Estimate, Trial, TrialState

SEEDS = {"sensitivity": 8, "middle": 6, "uniform": 6}
POLL_SECONDS = 0.2   # between two looks at what others are measuring, when there is nothing left to begin


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
    """One contender under real decoding. split: "calibration" or "holdout". prompts: of it, over which it was timed."""

    recipe: Recipe
    predicted: float | None
    speedup: Estimate
    split: str
    prompts: int

    def as_dict(self) -> dict[str, Any]:
        """For the study."""
        return {"recipe": self.recipe.as_data(), "predicted": self.predicted,
                "speedup": {"mean": self.speedup.mean, "low": self.speedup.low, "high": self.speedup.high}, "split": self.split}


@dataclass(frozen=True)
class ToBeat:
    """The speedup predicted of lookup alone: a mask that brings no more is no reason to draft with it."""

    speedup: float


@dataclass(frozen=True)
class Noted:
    """Something worth knowing that is no step forward. doubtful: it puts what this search measures in doubt."""

    sentence: str
    doubtful: bool = False


Event = Stage | Progress | ToBeat | Raced | Noted
Listener = Callable[[Event], None]


class Search:
    """Ask, judge, tell. seen: every judged mask, none of them twice, also those that other processes judged in a shared study.

    trials: of the whole study; limit: seconds of this process alone, counted from `started`.
    """

    def __init__(self, problem: SearchProblem, objective: Objective, ledger: Ledger | None, told: Iterable[Trial],
                 listen: Listener, started: float, limit: float | None, trials: int | None):
        self.problem, self.objective, self.ledger, self.listen = problem, objective, ledger, listen
        self.started, self.limit, self.trials = started, limit, trials
        # A failed trial that a killed process left behind is not a judgement: its mask may be asked for again.
        self.seen: dict[SkipMask, Trial] = {t.mask: t for t in told if t.state is TrialState.COMPLETE}
        self.pending: frozenset[SkipMask] = frozenset()   # being measured by others

    def run(self, name: str) -> None:
        """Seed, then search until something runs out.

        Raises: SearchError if no mask could be judged, or the study cannot be reached any more.
        """
        learner = make_searcher(name, self.problem)
        queue = {} if name in SEEDS or getattr(learner, "seeds_itself", False) else self._seeds()
        for trial in self.seen.values():
            learner.tell(trial)
        try:
            lost = self._catch_up(learner)
            if self.ledger and self.ledger.shared and (self.seen or self.pending):
                self.listen(Noted(f"searching together: {len(self.seen)} masks judged so far, {len(self.pending)} being judged elsewhere"))
            while not self._spent():
                began = perf_counter()
                mask = self._next([*lost, *queue], learner)
                if mask is None and not self.pending:
                    break
                if mask is None:   # the process that measures the last masks may die
                    sleep(POLL_SECONDS)
                else:
                    proposer = queue.get(mask) or (name if mask in lost else str(getattr(learner, "proposer", name)))
                    if judged := self.seen.get(mask) or self._judge(mask, proposer, began):
                        learner.tell(judged)
                lost = self._catch_up(learner)
        finally:
            if self.ledger:
                self.ledger.close()
        if not self.finalists(1):
            raise SearchError("no mask could be judged before the budget ran out: give it more time (--budget) or trials")

    def finalists(self, count: int) -> list[Trial]:
        """The best judged masks, by ratio to the baseline of their own process: a resumed search may run on a slower day."""
        judged = [t for t in self.seen.values() if t.state is TrialState.COMPLETE and math.isfinite(t.seconds_per_token)]
        return sorted(judged, key=lambda t: (-(t.speedup or 0.0), t.seconds_per_token))[:count]

    def _seeds(self) -> dict[SkipMask, str]:
        """The first masks of the searchers that need no experience, and whose each is."""
        seeds: dict[SkipMask, str] = {}
        for name, count in SEEDS.items():
            seeder, own = make_searcher(name, self.problem), list[SkipMask]()
            while len(own) < count and (mask := seeder.ask(own)) is not None:
                own.append(mask)
            seeds |= {mask: name for mask in own if mask not in seeds}
        return seeds

    def _catch_up(self, learner: Searcher) -> tuple[SkipMask, ...]:
        """Hear of what others judged and are judging. Returns masks whose measurement was broken off."""
        if self.ledger is None:
            return ()
        news = self.ledger.news()
        self.pending = news.pending
        for trial in news.judged:
            if trial.mask not in self.seen:
                self.seen[trial.mask] = trial
                learner.tell(trial)
        return news.lost

    def _next(self, queue: Iterable[SkipMask], learner: Searcher) -> SkipMask | None:
        """None: nothing is left to begin, now or for good."""
        if self.trials is not None and len(self.seen) + len(self.pending) >= self.trials:
            return None
        return next((m for m in queue if m not in self.seen and m not in self.pending), None) or learner.ask(self.pending)

    def _judge(self, mask: SkipMask, proposer: str, began: float) -> Trial | None:
        """None: another process has the mask, or the study needs no more."""
        number = None
        if self.ledger and (self.ledger.shared or self.objective.fidelity != "replay"):   # a kill loses no more than a cheap one
            number = self.ledger.claim(mask, self.trials)
            if number is None:
                return None
        try:
            trial = replace(self.objective.judge(mask), searcher=proposer, search_seconds=perf_counter() - began)
        except BaseException as error:
            if self.ledger and number is not None:
                self.ledger.give_back(number, interrupted=isinstance(error, KeyboardInterrupt))
            raise
        if self.ledger and number is None:
            self.ledger.add(trial)
        elif self.ledger and number is not None and not self.ledger.finish(number, trial):
            return None
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
