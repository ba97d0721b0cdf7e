"""The base of searchers that learn from trials."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import ClassVar

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.history import Observation, TrialHistory
from skipsearch.searchers.random import Random

MAX_PROPOSED = 10_000  # masks of one call of `propose`, which need not end


class LearningSearcher:
    """Keeps the trials of all searchers. A subclass has `propose`.

    min_observed: masks with a time before the first call of `propose`; until then, masks are drawn
    at random.
    """

    min_observed: ClassVar[int] = 1

    def __init__(self, problem: SearchProblem) -> None:
        self.problem, self.history = problem, TrialHistory(problem)
        self.random = Random(problem)

    def tell(self, trial: Trial) -> None:
        self.history.add(trial)
        self.random.tell(trial)

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        observed = self.history.observations()
        if sum(one.finite for one in observed) >= self.min_observed:
            taken = self.history.excluded(pending)
            proposed = self.propose(observed, self.history.make_rng(pending))
            for mask in islice(proposed, MAX_PROPOSED):
                if mask not in taken:
                    return mask
        return self.random.ask(pending)

    def propose(
        self, observed: tuple[Observation, ...], rng: np.random.Generator
    ) -> Iterator[SkipMask]:
        """Yield masks, the most promising first. The first one that is new is judged.

        If none of MAX_PROPOSED masks is new, one is drawn at random.
        observed: the judged masks, as `TrialHistory.observations` returns them.
        rng: seeded again for each call.
        """
        raise NotImplementedError
