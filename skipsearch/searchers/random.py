"""`random`: masks drawn at random, the baseline of every adaptive searcher."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import FixedOrderSearcher


class Random(FixedOrderSearcher):
    """A searcher that draws the number of skipped units, then the units.

    No mask is drawn twice. The search ends when every mask has been drawn.

    Drawing each bit with probability 1/2 would nearly always skip about half of the model. Drawing
    the number first makes every number equally likely.

    Source: random search as a baseline, Bergstra & Bengio 2012.
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        rng = np.random.default_rng(problem.seed)
        n = len(problem.units)
        undrawn = {count: math.comb(n, count) for count in range(1, n + 1)}
        drawn: set[frozenset[int]] = set()
        while undrawn:
            count = list(undrawn)[rng.integers(len(undrawn))]
            while (units := frozenset(rng.permutation(n)[:count].tolist())) in drawn:
                pass
            drawn.add(units)
            undrawn[count] -= 1
            if not undrawn[count]:
                del undrawn[count]
            yield problem.mask_of(units)
