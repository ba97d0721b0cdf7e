"""`evolution`: a genetic algorithm that breeds the best masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.history import Observation
from skipsearch.searchers.learning import LearningSearcher

# The best judged masks, from which children are bred. They are few, because a search has only some
# hundred children.
N_PARENTS = 5
MAX_TRIES = 64  # children bred before one is drawn at random instead


class Evolution(LearningSearcher):
    """A searcher that crosses two of the 5 best masks bit by bit, then mutates the child.

    Each bit of the child is flipped with probability 1/n. There are no generations (steady state):
    every judged mask, whichever searcher proposed it, joins the population at once, and only the
    best masks are kept. A child that was already judged is mutated at a growing rate until it is
    new. The search ends when every mask has been judged.

    Source: steady-state genetic algorithm with uniform crossover (Syswerda 1989).
    """

    min_observed = 12

    def propose(
        self, observed: tuple[Observation, ...], rng: np.random.Generator
    ) -> Iterator[SkipMask]:
        parents = sorted(
            (j for j in observed if j.finite), key=lambda j: (j.log_time, sorted(j.units))
        )
        for bred in range(MAX_TRIES):
            yield self.problem.mask_of(
                self._breed_child(parents[:N_PARENTS], rng, flip_probability=1 + bred / 8)
            )

    def _breed_child(
        self, parents: Sequence[Observation], rng: np.random.Generator, flip_probability: float
    ) -> list[int]:
        """Return the units (sub-layers or layers) that a child of two random parents skips."""
        n = len(self.problem.units)
        mother, father = (parents[p].units for p in rng.choice(len(parents), size=2, replace=False))
        bits = [u in (mother if rng.random() < 0.5 else father) for u in range(n)]
        return [u for u in range(n) if bits[u] != (rng.random() < flip_probability / n)]
