"""The trials of a search, in the form in which adaptive searchers use them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState
from skipsearch.searchers.base import SearchProblem

MIN_RELATIVE_ERROR = 1e-3  # least relative standard error that a measured time is given


@dataclass(frozen=True, slots=True)
class Observation:
    """One judged mask.

    units: the units that the mask skips.
    log_time: log of the time per token; inf if the trial failed or its time is not valid.
    variance: variance of log_time.
    """

    units: frozenset[int]
    log_time: float
    variance: float

    @property
    def finite(self) -> bool:
        """Whether the trial gave a time, so that `log_time` is finite."""
        return math.isfinite(self.log_time)


class TrialHistory:
    """A history of all trials that `tell` has passed on, whichever searcher proposed their masks.

    A trial's fidelity is "replay" (its time is predicted) or "wall" (measured). Predicted and
    measured times of one mask differ by more than their standard errors. A searcher therefore
    learns from trials of one fidelity: the one with more trials, or "wall" if both have equally
    many. It also learns nothing from masks that the problem does not allow (never_skip,
    whole_layers). But it proposes no mask again that has a trial of any kind. If two trials have
    the same mask, the later one counts.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._seen: set[SkipMask] = set()
        self._trials: dict[str, dict[frozenset[int], Trial]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, trial: Trial) -> None:
        """Add a trial. Raises: SearchError if the mask is of another model."""
        units = self._problem.units_of(trial.mask)
        self._seen.add(trial.mask)
        if units is not None:
            self._trials.setdefault(trial.fidelity, {})[units] = trial
            self._counts[trial.fidelity] += 1

    def excluded(self, pending: Collection[SkipMask]) -> set[SkipMask]:
        """Return the masks not to propose: judged ones, pending ones and the empty one."""
        return self._seen | set(pending) | {SkipMask(self._problem.n_layers)}

    def observations(self) -> tuple[Observation, ...]:
        """Return the observations to learn from, in the order in which masks were first told.

        If every trial has an interleaved baseline, times are relative to it, because their ratio
        cancels out the noise of the machine. The variance follows from the standard error by the
        delta method: var(log t) = (stderr / t)².
        """
        if not self._counts:
            return ()
        fidelity = max(self._counts, key=lambda name: (self._counts[name], name))
        trials = self._trials[fidelity]
        finite = [trial for trial in trials.values() if not has_no_time(trial)]
        relative = all(trial.baseline_seconds_per_token for trial in finite)

        def judge(units: frozenset[int], trial: Trial) -> Observation:
            if has_no_time(trial):
                return Observation(units, math.inf, 0.0)
            time = trial.seconds_per_token / (
                (trial.baseline_seconds_per_token or 1.0) if relative else 1.0
            )
            error = trial.stderr / trial.seconds_per_token
            return Observation(
                units,
                math.log(time),
                max(MIN_RELATIVE_ERROR, error if math.isfinite(error) else 0.0) ** 2,
            )

        return tuple(judge(units, trial) for units, trial in trials.items())

    def best(self) -> Observation | None:
        """Return the fastest judged mask; None if none has a time."""
        return min(
            (j for j in self.observations() if j.finite), key=lambda j: j.log_time, default=None
        )

    def make_rng(self, pending: Collection[SkipMask]) -> np.random.Generator:
        """Return a generator that depends on the seed and the number of known masks alone.

        It does not depend on earlier calls of `ask`, so telling the trials again resumes a search.
        """
        return np.random.default_rng([self._problem.seed, len(self.excluded(pending))])


def has_no_time(trial: Trial) -> bool:
    """Return whether a trial failed, or its time is not a positive number."""
    seconds = trial.seconds_per_token
    return trial.state is TrialState.FAILED or not math.isfinite(seconds) or seconds <= 0
