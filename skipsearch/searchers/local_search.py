"""`exchange`: flips and exchanges of the best mask known."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.history import Observation, TrialHistory
from skipsearch.searchers.predictions import costs_or_uniform, predicted_speedup


class LocalSearch:
    """A searcher that flips single units of the best known mask and exchanges pairs.

    A flip adds a unit to the skipped ones of the best mask or removes one. An exchange does both.
    LocalSearch starts from the best mask of any searcher and moves to each better mask. The effects
    of measured flips decide which pairs come first. The search ends at a mask that no flip and no
    exchange improves. Without trials, it begins with the mask that skips the half of the units that
    does least harm alone.

    Source: forward-backward exchange of feature selection (Pudil et al. 1994).
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._history = TrialHistory(problem)

    def tell(self, trial: Trial) -> None:
        self._history.add(trial)

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        taken = self._history.excluded(pending)
        masks = map(self._problem.mask_of, self._list_units())
        return next((mask for mask in masks if mask not in taken), None)

    def _list_units(self) -> Iterator[frozenset[int]]:
        """Yield the units of each mask in reach, the most promising first.

        Pending masks do not change the order, so several workers never wait for each other.
        """
        n, harm = len(self._problem.units), self._single_skip_log_times()
        if (best := self._history.best()) is None:
            yield frozenset(sorted(range(n), key=lambda u: (harm.get(u, 0.0), u))[: max(1, n // 2)])
            best_units = frozenset[int]()
        else:
            best_units = best.units
        effects = observed_effects(self._history.observations())
        yield from neighbours(best_units, n, harm | effects)

    def _single_skip_log_times(self) -> dict[int, float]:
        """Return the predicted log time of skipping each unit alone, relative to the best unit.

        Returns {} if nothing was measured.
        """
        measure = self._problem.evidence.single_skip_acceptance
        if measure is None:
            return {}
        alphas = measure()
        costs = costs_or_uniform(self._problem)
        logs = [
            -math.log(
                predicted_speedup(
                    self._problem.mask_of([u]), math.prod(alphas[s] for s in unit), costs
                )
            )
            for u, unit in enumerate(self._problem.units)
        ]
        return {u: log - min(logs) for u, log in enumerate(logs)}


def neighbours(
    skipped: frozenset[int], n: int, harm: Mapping[int, float]
) -> Iterator[frozenset[int]]:
    """Yield masks one flip away, then masks one exchange away.

    In each group, the most promising masks come first. harm: of skipping each unit, in log time.
    """
    into = sorted(set(range(n)) - skipped, key=lambda u: (harm.get(u, 0.0), u))
    out = sorted(skipped, key=lambda u: (-harm.get(u, 0.0), u))
    yield from (skipped | {u} for u in into)
    yield from (skipped - {u} for u in out)
    pairs = sorted((a + b, i, o) for a, i in enumerate(into) for b, o in enumerate(out))
    yield from (skipped - {o} | {i} for _, i, o in pairs)


def observed_effects(judged: Sequence[Observation]) -> dict[int, float]:
    """Return how much skipping a unit added to the log time, for units with such a trial.

    A trial shows the effect of a unit if its mask differs in this unit alone from the best mask of
    that time.
    """
    added: dict[int, float] = {}
    best: Observation | None = None
    for j in judged:
        if not j.finite:
            continue
        if best is not None and len(flipped := j.units ^ best.units) == 1:
            (unit,) = flipped
            added[unit] = (j.log_time - best.log_time) * (1 if unit in j.units else -1)
        if best is None or j.log_time < best.log_time:
            best = j
    return added
