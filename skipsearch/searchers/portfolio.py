"""`auto`: non-adaptive searchers first, then the adaptive one that gains most per second."""

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

# The most masks of each non-adaptive searcher. The three masks of a searcher that goes from coarse
# to fine skip a half, a quarter and three quarters of the model; clasp has three for each of its
# four ways. The searcher that is most often best comes first: after a good mask, worse masks are
# judged on a few prompts only.
FORMULAS = {
    "clasp": 12,
    "sensitivity": 3,
    "knapsack": 3,
    "asd": 3,
    "middle": 3,
    "uniform": 3,
    "s3d": 3,
}
# The adaptive searchers in the order of their first turns, the cheapest first.
ADAPTIVE = ("exchange", "evolution", "tpe", "gp")
MASKS_PER_TURN = 12  # masks that one adaptive searcher proposes before another may take over
FAIRNESS_INTERVAL = 5  # every fifth turn goes to the searcher that has waited longest
# The least gain that a turn is credited with. If no searcher gains anything, the cheap ones
# therefore get more turns.
MIN_GAIN = 1e-3
GAIN_DECAY = 0.7  # weight of a turn relative to the next one of the same searcher


@dataclass
class Turn:
    """A turn of one adaptive searcher: the masks that it proposed in a row.

    gain: log of the ratio of the best time before the turn to the best time after it.
    seconds: time in which its masks were proposed and judged.
    """

    name: str
    n_masks: int = 0
    gain: float = 0.0
    seconds: float = 0.0


class Portfolio:
    """A searcher that asks each non-adaptive searcher for a few masks, then adaptive ones in turn.

    All of them learn from every trial.

    The next turn goes to the searcher that gains most per second of proposing and judging; recent
    turns weigh most. If a turn gained nothing, a searcher that has had no turn goes first. Every
    fifth turn goes to the searcher that has waited longest. A turn ends after 12 masks, or after
    the time that 12 masks usually take, so a slow searcher proposes fewer.
    All of this follows from the trials (`searcher`, `search_seconds`), so telling them again
    resumes a search. Searchers that lack evidence do not take part.
    proposer: the searcher that proposed the mask of the latest `ask`.
    """

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
        """Yield the names of searchers in the order in which `ask` tries them."""
        yield from (
            name for name, limit in FORMULAS.items() if self._n_judged.get(name, limit) < limit
        )
        adaptive = [name for name in ADAPTIVE if name in self._searchers]
        current = (
            self._turns[-1].name if self._turns and not self._is_over(self._turns[-1]) else None
        )
        yield from sorted(
            adaptive, key=lambda name: (name == current, self._priority(name)), reverse=True
        )
        # no adaptive searcher has a mask left
        yield from (name for name in FORMULAS if name in self._searchers)

    def _priority(self, name: str) -> tuple[float, ...]:
        """Return the sort key of a searcher; the greatest has the next turn."""
        own = [i for i, turn in enumerate(self._turns) if turn.name == name]
        waited = len(self._turns) - own[-1] if own else math.inf
        order = -ADAPTIVE.index(name)
        if not own and not (self._turns and self._turns[-1].gain > MIN_GAIN):
            return (2, order)
        if len(self._turns) % FAIRNESS_INTERVAL == FAIRNESS_INTERVAL - 1:
            return (1, waited, order)
        return (0, _gain_per_second([self._turns[i] for i in own]), waited, order)

    def _is_over(self, turn: Turn) -> bool:
        """Return whether a turn has used its masks or its time."""
        return turn.n_masks >= MASKS_PER_TURN or (
            turn.seconds > MASKS_PER_TURN * median(self._seconds) and turn.n_masks > 1
        )


def _gain_per_second(turns: Sequence[Turn]) -> float:
    """Return the gain per second over turns, later turns weighted more; 0 without turns."""
    gain = seconds = 0.0
    for turn in turns:
        gain, seconds = (
            GAIN_DECAY * gain + max(turn.gain, MIN_GAIN),
            GAIN_DECAY * seconds + turn.seconds,
        )
    return gain / seconds if seconds else gain


def _buildable_searchers(problem: SearchProblem) -> Iterator[tuple[str, Searcher]]:
    """Yield (name, searcher) of the searchers whose evidence was measured."""
    from skipsearch.searchers import make_searcher

    for name in (*FORMULAS, *ADAPTIVE):
        try:
            yield name, make_searcher(name, problem)
        except SearchError:
            continue
