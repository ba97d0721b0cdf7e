"""`auto`: searchers that need no experience first, then whichever learning searcher gains most for
its time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.errors import SearchError
from skipsearch.searchers.base import Searcher, SearchProblem
from skipsearch.searchers.history import has_no_time

# Masks of each, at most. Of those that go coarse to fine these are half of the model and its
# quarters, of clasp in each of its four ways. The one that most often leads goes first: masks
# behind a good one are judged on a few prompts.
FORMULAS = {
    "clasp": 12,
    "sensitivity": 3,
    "knapsack": 3,
    "asd": 3,
    "middle": 3,
    "uniform": 3,
    "s3d": 3,
}
# In the order of their first turns, the cheapest to ask first. Not greedy: it ends with what
# exchange does.
ADAPTIVE = ("exchange", "evolution", "tpe", "gp")
MASKS_PER_TURN = 12  # masks that one adaptive searcher proposes before another may take over
FAIRNESS_INTERVAL = 5  # every fifth turn goes to the searcher that waited longest
# least gain that a turn is credited with, so that among searchers that gain nothing the cheap ones
# get more turns
MIN_GAIN = 1e-3
GAIN_DECAY = 0.7  # weight of a turn beside that of the same searcher's next one


@dataclass
class Turn:
    """gain: log of the best time before over that after. seconds: spent on asking and judging."""

    name: str
    n_masks: int = 0
    gain: float = 0.0
    seconds: float = 0.0


class Portfolio:
    """A few masks of each searcher that knows them beforehand, then turns of the adaptive ones, all
    of which hear of every mask.

    The next turn is that of the searcher that gains most per second of asking and judging, recent
    turns weighing most. When a turn gained nothing, one that had none yet goes first, and every
    fifth turn goes to the searcher that waited longest. A turn ends after 12 masks, or when it took
    as long as 12 masks usually do: a searcher that thinks for long proposes fewer. All of it
    follows from the told trials (`searcher`, `search_seconds`), so that telling them again resumes
    a search. Searchers whose evidence was not measured are left out. proposer: who proposed the
    mask of the latest `ask`."""

    seeds_itself = True

    def __init__(self, problem: SearchProblem) -> None:
        self._searchers = dict(_buildable_searchers(problem))
        self._n_judged = dict.fromkeys(self._searchers, 0)
        self._turns: list[Turn] = []
        self._best_log_time = math.inf
        self._seconds: list[float] = []
        self.proposer = ""

    def tell(self, trial: Trial) -> None:
        for searcher in self._searchers.values():
            searcher.tell(trial)
        gain = 0.0
        if not has_no_time(trial):
            time = math.log(trial.seconds_per_token / (trial.baseline_seconds_per_token or 1.0))
            gain, self._best_log_time = (
                (
                    max(0.0, self._best_log_time - time)
                    if math.isfinite(self._best_log_time)
                    else 0.0
                ),
                min(self._best_log_time, time),
            )
        name = trial.searcher
        if name not in self._searchers:
            return
        self._n_judged[name] += 1
        seconds = trial.search_seconds or 0.0
        self._seconds.append(seconds)
        if name in ADAPTIVE:
            if not self._turns or self._turns[-1].name != name or self._is_over(self._turns[-1]):
                self._turns.append(Turn(name))
            turn = self._turns[-1]
            turn.n_masks, turn.gain, turn.seconds = (
                turn.n_masks + 1,
                turn.gain + gain,
                turn.seconds + seconds,
            )

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        for name in self._order():
            if (mask := self._searchers[name].ask(pending)) is not None:
                self.proposer = name
                return mask
        return None

    def _order(self) -> Iterator[str]:
        """Who is asked, until one of them has a mask."""
        yield from (
            name for name, most in FORMULAS.items() if self._n_judged.get(name, most) < most
        )
        adaptive = [name for name in ADAPTIVE if name in self._searchers]
        current = (
            self._turns[-1].name if self._turns and not self._is_over(self._turns[-1]) else None
        )
        yield from sorted(
            adaptive, key=lambda name: (name == current, self._priority(name)), reverse=True
        )
        yield from (
            name for name in FORMULAS if name in self._searchers
        )  # nobody else has an idea left

    def _priority(self, name: str) -> tuple[float, ...]:
        """The greatest one has the next turn."""
        own = [i for i, turn in enumerate(self._turns) if turn.name == name]
        waited = len(self._turns) - own[-1] if own else math.inf
        order = -ADAPTIVE.index(name)
        if not own and not (self._turns and self._turns[-1].gain > MIN_GAIN):
            return (2, order)
        if len(self._turns) % FAIRNESS_INTERVAL == FAIRNESS_INTERVAL - 1:
            return (1, waited, order)
        return (0, _gain_per_second([self._turns[i] for i in own]), waited, order)

    def _is_over(self, turn: Turn) -> bool:
        return turn.n_masks >= MASKS_PER_TURN or (
            turn.seconds > MASKS_PER_TURN * median(self._seconds) and turn.n_masks > 1
        )


def _gain_per_second(turns: Sequence[Turn]) -> float:
    """Gain per second of a searcher's turns, faded; 0 if it had none yet."""
    gain = seconds = 0.0
    for turn in turns:
        gain, seconds = (
            GAIN_DECAY * gain + max(turn.gain, MIN_GAIN),
            GAIN_DECAY * seconds + turn.seconds,
        )
    return gain / seconds if seconds else gain


def _buildable_searchers(problem: SearchProblem) -> Iterator[tuple[str, Searcher]]:
    """Those that find the evidence they need."""
    from skipsearch.searchers import make_searcher

    for name in (*FORMULAS, *ADAPTIVE):
        try:
            yield name, make_searcher(name, problem)
        except SearchError:
            continue
