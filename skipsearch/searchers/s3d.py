"""`s3d`: how much to skip from a formula for acceptance, fitted to a handful of measurements."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, expected_speedup
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import coarse_to_fine
from skipsearch.searchers.middle import order_from_middle
from skipsearch.searchers.predictions import costs_or_uniform, draft_ratio, verify_ratio

# Middle masks that are measured before the formula is used: half, a quarter and three quarters of
# the model.
N_PROBES = 3


@dataclass(frozen=True, slots=True)
class SkipCountForecast:
    """The prediction for a mask that skips `count` units around the middle.

    improvement: the improvement factor at the best draft length.
    """

    improvement: float
    draft_length: int
    count: int


class S3DSearcher:
    """A searcher that skips units around the middle, as many as a formula predicts to be best.

    The formula predicts the improvement factor (the speedup) for each number of skipped units.
    Masks are proposed in the order of this factor, best first.

    α(β; U) = (1 - U^β) / (1 - U) is fitted to (β, α) of judged middle masks. Three middle masks
    (probes) are proposed first; every further trial refines the fit. The factor is that of
    sequential drafting with the measured costs (equal costs if none were measured). The paper
    instead drafts all tokens in one pass of a trained model. The search
    ends when no remaining mask promises to be faster than plain decoding, so it may end after the
    three probes.

    Source: S3D, eq. 10 and appendix E; Leviathan et al. 2023, theorem 3.8, for the sequential
    factor.
    """

    def __init__(self, problem: SearchProblem) -> None:
        order = order_from_middle(problem)
        self._masks = {
            count: problem.mask_of(order[:count]) for count in coarse_to_fine(len(order))
        }
        self._costs = costs_or_uniform(problem)
        self._judged: dict[SkipMask, Trial] = {}

    def tell(self, trial: Trial) -> None:
        self._judged[trial.mask] = trial

    def ask(self, pending: Collection[SkipMask] = ()) -> SkipMask | None:
        taken = self._judged.keys() | set(pending)
        return next((mask for mask in self._walk() if mask not in taken), None)

    def forecast(self) -> list[SkipCountForecast]:
        """Return the forecast of every count, best first.

        The list is empty until a trial of a middle mask has an α.
        """
        measured = [
            (draft_ratio(self._costs, mask), trial.alpha)
            for mask in self._masks.values()
            if (trial := self._judged.get(mask)) is not None and trial.alpha is not None
        ]
        points = [(beta, alpha) for beta, alpha in measured if math.isfinite(alpha)]
        if not points:
            return []
        u = fit_u(points)
        forecasts = []
        for count, mask in self._masks.items():
            beta = draft_ratio(self._costs, mask)
            alpha = acceptance_from_beta(beta, u)
            factors = [
                (expected_speedup(alpha, g, beta, verify_ratio(self._costs, g)), -g)
                for g in range(1, len(self._costs.verify))
            ]
            improvement, shortest = max(factors)
            forecasts.append(SkipCountForecast(improvement, -shortest, count))
        return sorted(forecasts, key=lambda p: (-p.improvement, p.count))

    def _walk(self) -> Iterator[SkipMask]:
        """Yield the probes, then all counts whose forecast is above 1, best first."""
        probes = list(self._masks.values())[:N_PROBES]
        yield from probes
        if ranked := self.forecast():
            yield from (self._masks[p.count] for p in ranked if p.improvement > 1)
        elif any(mask not in self._judged for mask in probes):
            # Other workers measure the probes; meanwhile, this one measures other counts.
            yield from self._masks.values()


def acceptance_from_beta(beta: float, u: float) -> float:
    """Return α of a draft's first token: (1 - u^β) / (1 - u), and β itself at u = 1.

    beta: cost of a draft step in full passes. α is above β if u < 1, and below β if u > 1.

    Source: S3D, eq. 10 (u = 0.01 there).
    """
    log_u = math.log(u)
    return (
        beta
        if abs(log_u) < 1e-9
        else min(1.0, max(0.0, math.expm1(beta * log_u) / math.expm1(log_u)))
    )


def fit_u(points: Sequence[tuple[float, float]]) -> float:
    """Return the u in (0, ∞) whose curve fits the (β, α) points best.

    The fit has the least squared error in α; u is found to 1 %. Below u = 1, α > β always, so a fit
    over (0, 1) alone could never advise against drafting.
    """
    # An even number of points, so that none of them is 0, where the formula is 0/0.
    log_u = np.linspace(-60, 60, 12_000)
    beta, alpha = np.asarray(points, dtype=float).T
    curves = np.expm1(np.outer(log_u, beta)) / np.expm1(log_u)[:, None]
    return math.exp(log_u[((curves - alpha) ** 2).sum(axis=1).argmin()])
