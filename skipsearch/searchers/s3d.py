"""`s3d`: how much to skip from a formula for acceptance, fitted to a handful of measurements."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers.base import SearchProblem
from skipsearch.searchers.fixed_order import coarse_to_fine
from skipsearch.searchers.middle import order_from_middle
from skipsearch.searchers.predictions import costs_or_uniform, draft_ratio, verify_ratio

# middle masks measured before the formula is believed: half, a quarter and three quarters of the
# model
N_PROBES = 3
PAPER_DELTA = 0.04  # what a round spends outside of its passes, in full passes


@dataclass(frozen=True, slots=True)
class SkipCountForecast:
    """What the formula says of skipping `count` units around the middle: the best draft length and
    its improvement factor.
    """

    improvement: float
    draft_length: int
    count: int


class S3DSearcher:
    """Skips symmetrically from the middle, as much as the improvement factor says, then its
    neighbours in order of that factor.

    α(β; U) = (1 - U^β) / (1 - U) is fitted to the told (β, α) of middle masks, three of which it
    asks for first; every further one refines the fit. The factor is that of sequential drafting
    with the measured costs (equal costs if none are): the paper drafts all tokens in one pass of a
    trained model (`one_pass_improvement`). None as soon as no mask not yet told promises to be
    faster than plain decoding: the formula may say "don't" after its three probes. Source: S3D,
    eqs. 10-12 and appendix E; Leviathan et al. 2023, theorem 3.8, for the sequential factor."""

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
        """Of every count, best first; none before the first middle mask with an α was told."""
        told = [
            (draft_ratio(self._costs, mask), trial.alpha)
            for mask in self._masks.values()
            if (trial := self._judged.get(mask)) is not None and trial.alpha is not None
        ]
        points = [(beta, alpha) for beta, alpha in told if math.isfinite(alpha)]
        if not points:
            return []
        u = fit_u(points)
        found = []
        for count, mask in self._masks.items():
            beta = draft_ratio(self._costs, mask)
            alpha = acceptance_from_beta(beta, u)
            factors = [
                (sequential_improvement(alpha, g, beta, verify_ratio(self._costs, g)), -g)
                for g in range(1, len(self._costs.verify))
            ]
            improvement, shortest = max(factors)
            found.append(SkipCountForecast(improvement, -shortest, count))
        return sorted(found, key=lambda p: (-p.improvement, p.count))

    def _walk(self) -> Iterator[SkipMask]:
        probes = list(self._masks.values())[:N_PROBES]
        yield from probes
        if ranked := self.forecast():
            yield from (self._masks[p.count] for p in ranked if p.improvement > 1)
        elif any(mask not in self._judged for mask in probes):
            # the probes are pending elsewhere: measure others meanwhile
            yield from self._masks.values()


def acceptance_from_beta(beta: float, u: float) -> float:
    """α of the first drafted token of a draft that costs β of a full pass: (1 - u^β) / (1 - u), and
    β itself at u = 1.

    u < 1 bends it above β, u > 1 below. Source: S3D, eq. 10 (u = 0.01 there).
    """
    log_u = math.log(u)
    return (
        beta
        if abs(log_u) < 1e-9
        else min(1.0, max(0.0, math.expm1(beta * log_u) / math.expm1(log_u)))
    )


def fit_u(points: Sequence[tuple[float, float]]) -> float:
    """The u in (0, ∞) whose curve passes the (β, α) points with the least squared error, to 1 % of
    u.

    Over (0, 1) alone α > β always, and a formula that cannot say "don't" is no advice.
    """
    log_u = np.linspace(
        -60, 60, 12_000
    )  # an even number of points: 0, where the formula is 0/0, is none of them
    beta, alpha = np.asarray(points, dtype=float).T
    curves = np.expm1(np.outer(log_u, beta)) / np.expm1(log_u)[:, None]
    return math.exp(log_u[((curves - alpha) ** 2).sum(axis=1).argmin()])


def mean_round_tokens(alphas: Sequence[float]) -> float:
    """τ: Σ_{n=1}^{γ+1} n · Π_{k<n} α_k · (1 - α_n, but 1 at n = γ + 1), for the acceptances
    α_1..α_γ of each drafted token.

    Source: S3D, eq. 11.
    """
    total, reached = 0.0, 1.0
    for n, alpha in enumerate(alphas, start=1):
        total += n * reached * (1 - alpha)
        reached *= alpha
    return total + (len(alphas) + 1) * reached


def one_pass_improvement(
    alpha: float, draft_length: int, beta: float, delta: float = PAPER_DELTA
) -> float:
    """τ / (δ + β + 1) where one draft pass yields all tokens, the k-th with α_k = (1.22 - 0.22 k)
    α.

    Raises: ValueError for draft_length > 5, beyond which the discount was not measured.
    Source: S3D, eqs. 12 and 14.
    """
    if not 1 <= draft_length <= 5:
        raise ValueError(
            f"draft_length is {draft_length}; the discount of one-pass drafts was measured for 1 "
            "to 5 tokens"
        )
    return mean_round_tokens([(1.22 - 0.22 * k) * alpha for k in range(1, draft_length + 1)]) / (
        delta + beta + 1
    )


def sequential_improvement(
    alpha: float, draft_length: int, beta: float, verify: float, delta: float = 0.0
) -> float:
    """τ / (δ + γβ + v) where each token takes a draft pass of its own, and no token is harder than
    the first.

    δ is 0 where, as in a measured latency table, the passes' own times include what surrounds them.
    """
    return mean_round_tokens([alpha] * draft_length) / (delta + draft_length * beta + verify)
