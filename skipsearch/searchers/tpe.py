"""`tpe`: Optuna's tree-structured Parzen estimator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState as OptunaState
from optuna.trial import create_trial

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.history import Observation
from skipsearch.searchers.learning import LearningSearcher

MAX_TRIES = 8  # suggestions without a new mask before bits are flipped


class TPE(LearningSearcher):
    """A searcher that models each bit of fast and of slow masks, independently of other bits.

    It proposes bits that are more likely in fast masks. It runs Optuna's sampler by ask and tell
    through a study in memory. A sampler that is sure suggests the same point repeatedly. TPE then
    flips bits of the suggestion, more of them each time, until the mask is new. The search ends
    when every mask has been judged.

    Source: Bergstra et al. 2011; Optuna's TPESampler.
    """

    min_observed = 10

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        self._distributions = {
            str(u): CategoricalDistribution((0, 1)) for u in range(len(problem.units))
        }
        self._study = _new_study()
        self._learned: tuple[Observation, ...] = ()  # the observations in the study

    def propose(
        self, observed: tuple[Observation, ...], rng: np.random.Generator
    ) -> Iterator[SkipMask]:
        self._learn(observed)
        self._study.sampler = optuna.samplers.TPESampler(
            seed=int(rng.integers(2**31)), n_startup_trials=self.min_observed
        )
        n = len(self.problem.units)
        for attempt in range(8 * MAX_TRIES):
            if attempt < MAX_TRIES:
                units = self._suggest()
            flips = rng.permutation(n)[: attempt // MAX_TRIES]
            yield self.problem.mask_of(units ^ frozenset(flips.tolist()))

    def _suggest(self) -> frozenset[int]:
        """Return the units that the sampler suggests to skip."""
        suggestion = self._study.ask(self._distributions)
        # Results are added by `_learn`, whoever proposed the mask, so this trial of Optuna's is
        # closed at once.
        self._study.tell(suggestion, state=OptunaState.FAIL)
        return frozenset(int(u) for u, bit in suggestion.params.items() if bit)

    def _learn(self, judged: tuple[Observation, ...]) -> None:
        """Add new observations to the study.

        Make a new study if earlier observations changed: a mask was judged again, or the history
        changed between replay trials and wall trials.
        """
        if judged[: len(self._learned)] != self._learned:
            self._study, self._learned = _new_study(), ()
        slowest = max(j.log_time for j in judged if j.finite)
        for j in judged[len(self._learned) :]:
            bits = {u: int(int(u) in j.units) for u in self._distributions}
            self._study.add_trial(
                create_trial(
                    params=bits,
                    distributions=self._distributions,
                    value=j.log_time if j.finite else slowest,
                )
            )
        self._learned = judged


def _new_study() -> optuna.Study:
    with _silence_optuna():
        return optuna.create_study()


@contextmanager
def _silence_optuna() -> Iterator[None]:
    """Run a block without the log messages of Optuna."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
