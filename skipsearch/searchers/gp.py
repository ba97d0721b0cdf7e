"""`gp`: Bayesian optimisation over masks, with a Gaussian process on their bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.exceptions import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf_discrete_local_search
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.history import Observation
from skipsearch.searchers.learning import LearningSearcher
from skipsearch.searchers.region import trust_region

INITIAL_RANDOM = 10  # random masks before the first model, unless other masks were told
RESTARTS, RAW_SAMPLES, MC_SAMPLES = 4, 256, 64
# Best masks in the acquisition's baseline. Timings are noisy, so any of these may be the best one.
# More of them take more time.
N_BASELINE = 16


class GP(LearningSearcher):
    """A searcher that models the log time per token over the bits of a mask.

    It proposes the mask with the largest expected noisy improvement. The kernel has one lengthscale
    for each unit; on {0, 1} it is an ARD Hamming kernel. The model knows the noise of each
    measurement. A failed mask gets the time of the slowest measured mask. Proposals are in a
    Hamming ball around the best mask (`trust_region`). They are never judged or pending masks. GP
    learns from any searcher's trials of one fidelity (`TrialHistory`). It proposes random masks
    only while it has fewer than 10 trials with a time. The search ends when every mask has been
    judged.

    Source: the idea, Draft & Verify (Zhang et al. 2024, section 3.3); qLogNEI, Ament et al. 2023;
    the region, Wan et al. 2021.
    """

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        self._fitted_on: Sequence[Observation] = ()
        self._hyperparameters: dict[str, Tensor] = {}

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        judged = self.history.observations()
        region = trust_region(judged, len(self.problem.units))
        finite = [j.log_time for j in judged if j.finite]
        if len(finite) < INITIAL_RANDOM or min(finite) == max(finite) or region.centre is None:
            # There is too little to model, or no mask to centre on.
            return self.random.ask(pending)
        rng = self.history.make_rng(pending)
        taken = self._units_of_masks(self.history.excluded(pending))
        near, radius = self._unseen_near(region.centre, region.radius, taken, rng)
        if not near:
            return self.random.ask(pending)
        reachable = [units for units in taken if len(units ^ region.centre) <= radius]
        with _seeded_single_thread(seed=int(rng.integers(2**31))):
            acquisition = self._build_acquisition(
                judged, region.centre, radius, self._units_of_masks(pending)
            )
            starts = self._bits(near).unsqueeze(1)  # [S, 1, d]
            with torch.no_grad():
                best = acquisition(starts).topk(min(RESTARTS, len(near))).indices
            chosen, _ = optimize_acqf_discrete_local_search(
                acquisition,
                discrete_choices=[torch.tensor([0.0, 1.0], dtype=torch.double)]
                * len(self.problem.units),
                q=1,
                num_restarts=len(best),
                batch_initial_conditions=starts[best],
                X_avoid=self._bits(reachable),
                inequality_constraints=[self._ball_constraint(region.centre, radius)],
                return_acq_values=False,
            )
        return self.problem.mask_of(chosen[0].nonzero().flatten().tolist())

    def _units_of_masks(self, masks: Collection[SkipMask]) -> set[frozenset[int]]:
        """Return the units that each mask skips, without masks that this problem does not allow."""
        return {units for mask in masks if (units := self.problem.units_of(mask)) is not None}

    def _unseen_near(
        self,
        centre: frozenset[int],
        radius: int,
        excluded: Collection[frozenset[int]],
        rng: np.random.Generator,
    ) -> tuple[list[frozenset[int]], int]:
        """Return (the units of masks drawn at distances 1..radius from the centre, the radius).

        Excluded masks are left out. If no mask is left, the radius is doubled, up to all units.
        """
        n = len(self.problem.units)
        while True:
            distances = rng.integers(1, radius + 1, size=RAW_SAMPLES)
            drawn = {
                centre ^ frozenset(rng.permutation(n)[:distance].tolist()) for distance in distances
            }
            near = sorted(drawn.difference(excluded), key=sorted)  # a set's order varies by run
            if near or radius == n:
                return near, radius
            radius = min(2 * radius, n)

    def _build_acquisition(
        self,
        judged: Sequence[Observation],
        centre: frozenset[int],
        radius: int,
        pending_units: Collection[frozenset[int]],
    ) -> qLogNoisyExpectedImprovement:
        """Return the acquisition function: the expected improvement of a mask.

        The improvement is over the best judged masks inside the trust region, which is a Hamming
        ball. After a restart, masks outside the new ball do not count, even if they are faster.
        """
        inside = sorted(
            (j for j in judged if len(j.units ^ centre) <= radius), key=lambda j: j.log_time
        )
        sampler = SobolQMCNormalSampler(torch.Size([MC_SAMPLES]), seed=self.problem.seed)
        baseline = self._bits([j.units for j in inside[:N_BASELINE]])
        expected = self._bits(sorted(pending_units, key=sorted)) if pending_units else None
        return qLogNoisyExpectedImprovement(
            self._fit_model(judged), baseline, sampler=sampler, X_pending=expected
        )

    def _fit_model(self, judged: Sequence[Observation]) -> SingleTaskGP:
        """Return the Gaussian process, conditioned on all observations.

        Hyperparameters are fitted again only if the number of observations has grown by a fifth
        since the last fit. Fitting takes most of the time of an `ask`, and its result changes
        little from one trial to the next.
        """
        slowest = max(j.log_time for j in judged if j.finite)
        gains = torch.tensor(
            [[-(j.log_time if j.finite else slowest)] for j in judged], dtype=torch.double
        )
        noise = torch.tensor(
            [[j.variance if j.finite else float(gains.var())] for j in judged], dtype=torch.double
        )
        bits = self._bits([j.units for j in judged])
        size = _fit_size(len(judged))
        if judged[:size] != self._fitted_on:
            model = SingleTaskGP(bits[:size], gains[:size], noise[:size])
            try:
                fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
            except ModelFittingError:
                # keep the mode of the prior
                model = SingleTaskGP(bits[:size], gains[:size], noise[:size])
            self._fitted_on = judged[:size]
            self._hyperparameters = {
                name: value.detach().clone() for name, value in model.named_parameters()
            }
        model = SingleTaskGP(bits, gains, noise)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._hyperparameters[name])
        return model.eval()

    def _bits(self, skipped: Collection[frozenset[int]]) -> Tensor:
        """Return skipped units as bits, [len(skipped), d] of 0.0 and 1.0, for d units."""
        rows = torch.zeros(len(skipped), len(self.problem.units), dtype=torch.double)
        for row, units in zip(rows, skipped, strict=True):
            row[sorted(units)] = 1.0
        return rows

    def _ball_constraint(self, centre: frozenset[int], radius: int) -> tuple[Tensor, Tensor, float]:
        """Return the constraint distance(x, c) = |c| + Σ (1 - 2 c_u) x_u <= radius.

        It is written as (indices, coefficients, bound) of Σ w·x >= bound.
        """
        coefficients = 2 * self._bits([centre])[0] - 1
        return torch.arange(len(coefficients)), coefficients, float(len(centre) - radius)


@contextmanager
def _seeded_single_thread(seed: int) -> Iterator[None]:
    """Run a block with torch seeded and limited to one thread; restore both afterwards.

    The matrices are too small for multithreading: with another busy process, two threads were 50
    times slower than one.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _fit_size(n: int) -> int:
    """Return the number of observations to fit on: the largest size that is at most n.

    Sizes start at INITIAL_RANDOM. Each size is the one before times 1.2, rounded up.
    """
    size = INITIAL_RANDOM
    while (larger := math.ceil(size * 1.2)) <= n:
        size = larger
    return size
