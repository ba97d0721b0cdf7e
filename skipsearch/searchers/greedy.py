"""`greedy`: backward elimination, then exchanges."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.history import Observation, TrialHistory
from skipsearch.searchers.predictions import costs_or_uniform, predicted_speedup

STEP_WIDTH = 8  # sub-layers judged at each step of the elimination
PATIENCE = 4  # steps without a new best before the elimination ends


class Greedy:
    """A searcher that skips one more sub-layer at a time, then improves the best mask.

    At each step it skips the sub-layer without which decoding is fastest. A full elimination judges
    L(2L + 1) masks. Here each step judges only the 8 sub-layers that looked least harmful when they
    were last judged. Before that, evidence.single_skip_acceptance says how harmful they are;
    without this evidence the first step judges all sub-layers. Elimination ends 4 steps after the
    best mask.

    Then Greedy flips single sub-layers of the best known mask and exchanges pairs, whichever
    searcher proposed this mask. It moves to each mask that is faster. The search ends at a mask
    that no flip and no exchange improves.

    Source: backward elimination and forward-backward exchange of feature selection (Pudil et al.
    1994).
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._history = TrialHistory(problem)

    def tell(self, trial: Trial) -> None:
        self._history.add(trial)

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        taken = self._history.excluded(pending)
        return next(
            (
                mask
                for units in self._walk(self._history.observations())
                if (mask := self._problem.mask_of(units)) not in taken
            ),
            None,
        )

    def _walk(self, judged: Sequence[Observation]) -> Iterator[frozenset[int]]:
        """Yield all masks of the search from its start, as far as the judged masks lead.

        The next proposal is the first of them that is not excluded. The judged masks of a step
        decide it, even if others are pending, so several workers never wait for each other.
        """
        n, harm = len(self._problem.units), self._single_skip_log_times()
        times = {j.units: j.log_time for j in judged}
        width = STEP_WIDTH if harm else n
        skipped: frozenset[int] = frozenset()
        fastest, stale = math.inf, 0
        while len(skipped) < n and stale < PATIENCE:
            looks_best = sorted(set(range(n)) - skipped, key=lambda u: (harm.get(u, 0.0), u))[
                :width
            ]
            width = STEP_WIDTH
            yield from (skipped | {u} for u in looks_best)
            known = {
                u: times[skipped | {u}]
                for u in looks_best
                if math.isfinite(times.get(skipped | {u}, math.inf))
            }
            chosen = min(known, key=lambda u: known[u], default=looks_best[0])
            for u in looks_best:
                if u != chosen:
                    harm[u] = known[u] - known[chosen] if u in known else math.inf
            skipped |= {chosen}
            fastest, stale = (
                (known[chosen], 0)
                if known.get(chosen, math.inf) < fastest
                else (fastest, stale + 1)
            )
        if (best := self._history.best()) is not None:
            yield from neighbours(best.units, n, harm | observed_effects(judged))

    def _single_skip_log_times(self) -> dict[int, float]:
        """Return the predicted log time of skipping each unit alone, relative to the best unit.

        Returns {} if nothing was measured.
        """
        alphas = self._problem.evidence.single_skip_acceptance
        if alphas is None:
            return {}
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
