"""Models that are a few small formulas, for searchers to search: what a mask costs, accepts and
takes is known exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState, expected_speedup
from skipsearch.searchers import Evidence, Searcher, SearchProblem


@dataclass(frozen=True)
class ToyModel:
    """Both ends of the model matter, its middle is nearly idle, and two neighbours skipped together
    hurt more than each alone.

    -log α = Σ harm + clash for each pair of consecutive skipped sub-layers; the time is that of the
    best draft length of 1..8."""

    harms: tuple[float, ...]
    cosines: tuple[float, ...]
    costs: Costs
    clash: float = 0.01

    @property
    def n_layers(self) -> int:
        return len(self.harms) // 2

    @classmethod
    def random(cls, n_layers: int, seed: int = 0) -> ToyModel:
        rng = np.random.default_rng(seed)
        n = 2 * n_layers
        from_middle = np.abs(np.linspace(-1, 1, n))
        harms = (0.005 + 0.6 * from_middle**4) * rng.lognormal(sigma=0.6, size=n)
        sublayers = tuple(float(c) for c in np.where(np.arange(n) % 2, 0.8e-3, 1.2e-3))
        full = 1e-3 + sum(sublayers)
        costs = Costs(
            sublayers, overhead=1e-3, verify=tuple(full * (1 + 0.03 * rows) for rows in range(9))
        )
        return cls(tuple(harms.tolist()), tuple(np.exp(-harms).tolist()), costs)

    def alpha(self, mask: SkipMask) -> float:
        skipped = mask.sublayers
        return math.exp(
            -sum(self.harms[s] for s in skipped)
            - self.clash * sum(s + 1 in skipped for s in skipped)
        )

    def trial(self, mask: SkipMask, fidelity: str = "replay") -> Trial:
        beta = self.costs.draft_step_seconds(mask) / self.costs.verify[0]
        full = self.costs.verify[0]
        seconds = min(
            full / expected_speedup(self.alpha(mask), g, beta, v / full)
            for g, v in enumerate(self.costs.verify)
            if g
        )
        return Trial(
            mask,
            seconds,
            0.01 * seconds,
            fidelity,
            self.alpha(mask),
            None,
            beta,
            baseline_seconds_per_token=full,
        )

    def problem(
        self, seed: int = 0, never_skip: frozenset[int] = frozenset(), whole_layers: bool = False
    ) -> SearchProblem:
        network = ResidualNetwork.random(self.n_layers)
        evidence = Evidence(
            cosines=self.cosines,
            single_skip_acceptance=lambda: tuple(math.exp(-h) for h in self.harms),
            costs=self.costs,
            states=network.states(),
            probe=network.probe,
        )
        return SearchProblem(self.n_layers, never_skip, evidence, seed, whole_layers)


@dataclass(frozen=True)
class HiddenMask:
    """A model whose best mask is any mask at all: each sub-layer that differs from it costs time,
    neighbours that differ more.

    No searcher can win by preferring to skip, or to keep.
    """

    target: SkipMask
    weights: tuple[float, ...]

    @classmethod
    def random(cls, n_layers: int, seed: int) -> HiddenMask:
        rng = np.random.default_rng([7, seed])
        target = SkipMask.from_bits(rng.integers(2, size=2 * n_layers).tolist())
        return cls(target, tuple(rng.uniform(0.02, 0.2, 2 * n_layers).tolist()))

    def regret(self, mask: SkipMask) -> float:
        wrong = mask.sublayers ^ self.target.sublayers
        return sum(self.weights[s] for s in wrong) + 0.05 * sum(s + 1 in wrong for s in wrong)

    def trial(self, mask: SkipMask, fidelity: str = "replay") -> Trial:
        seconds = 0.02 * math.exp(self.regret(mask))
        return Trial(mask, seconds, 0.005 * seconds, fidelity, alpha=0.8, beta=0.5)


@dataclass(frozen=True)
class ResidualNetwork:
    """Layer i: h + attention branch, then + MLP branch, each a random linear map and a tanh.
    `parallel`: both read the same h.
    """

    weights: Tensor  # [2L, H, H]
    inputs: Tensor  # [N, H]
    parallel: bool = False

    @classmethod
    def random(
        cls, n_layers: int, seed: int = 0, positions: int = 12, parallel: bool = False
    ) -> ResidualNetwork:
        generator = torch.Generator().manual_seed(seed)
        hidden = 8
        scale = torch.rand(2 * n_layers, 1, 1, generator=generator)
        weights = (
            torch.randn(2 * n_layers, hidden, hidden, generator=generator) * scale / hidden**0.5
        )
        return cls(weights, torch.randn(positions, hidden, generator=generator), parallel)

    def probe(self, i: int, states: Tensor, attn: bool, mlp: bool) -> Tensor:
        after = states + torch.tanh(states @ self.weights[2 * i]) if attn else states
        read = states if self.parallel else after
        return after + torch.tanh(read @ self.weights[2 * i + 1]) if mlp else after

    def run(self, mask: SkipMask) -> Tensor:
        """[N, H]: what the draft under `mask` ends with."""
        state = self.inputs
        for i in range(len(self.weights) // 2):
            state = self.probe(i, state, i not in mask.attn, i not in mask.mlp)
        return state

    def states(self) -> Tensor:
        """[L + 1, N, H] of the full model."""
        states = [self.inputs]
        for i in range(len(self.weights) // 2):
            states.append(self.probe(i, states[-1], True, True))
        return torch.stack(states)


def drive(searcher: Searcher, toy: ToyModel | HiddenMask, evaluations: int) -> list[Trial]:
    """Ask, judge, tell, until the evaluations or the proposals run out."""
    trials: list[Trial] = []
    while len(trials) < evaluations and (mask := searcher.ask()) is not None:
        trials.append(
            replace(toy.trial(mask), searcher=getattr(searcher, "proposer", ""))
        )  # as the driver does
        searcher.tell(trials[-1])
    return trials


def failure(mask: SkipMask) -> Trial:
    return Trial(mask, math.inf, state=TrialState.FAILED)


def slowed(trial: Trial, factor: float) -> Trial:
    return replace(trial, seconds_per_token=trial.seconds_per_token * factor)
