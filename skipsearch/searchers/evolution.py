"""`evolution`: a genetic algorithm that breeds the best masks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from skipsearch.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.memory import Judged, Memory
from skipsearch.searchers.random import Random
from skipsearch.stats import Trial

PARENTS = 5     # masks that breed: the best ever told. Few, since a search has some hundred children and no thousands
START = 12        # random masks before the first child
TRIES = 64        # children bred before one is drawn at random instead


class Evolution:
    """Crosses two of the 5 best masks bit by bit and flips each bit of the child with probability 1/n.

    Steady state: every told mask, anybody's, enters the population at once and the best survive, so nothing waits for a
    generation. A child already told mutates more until it is new. Ends when every mask has been judged.
    Source: steady-state genetic algorithm with uniform crossover (Syswerda 1989).
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._memory = Memory(problem)
        self._random = Random(problem)

    def tell(self, trial: Trial) -> None:
        self._memory.add(trial)
        self._random.tell(trial)

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        parents = sorted((j for j in self._memory.judged() if j.finite), key=lambda j: (j.log_time, sorted(j.units)))
        if len(parents) < START:
            return self._random.ask(pending)
        taken, rng = self._memory.taken(pending), self._memory.rng(pending)
        for bred in range(TRIES):
            mask = self._problem.mask_of(self._child(parents[:PARENTS], rng, flips=1 + bred / 8))
            if mask not in taken:
                return mask
        return self._random.ask(pending)

    def _child(self, parents: Sequence[Judged], rng: np.random.Generator, flips: float) -> list[int]:
        n = len(self._problem.units)
        mother, father = (parents[p].units for p in rng.choice(len(parents), size=2, replace=False))
        bits = [u in (mother if rng.random() < 0.5 else father) for u in range(n)]
        return [u for u in range(n) if bits[u] != (rng.random() < flips / n)]
