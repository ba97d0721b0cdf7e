"""Predict the speedup of a mask as if each skipped unit lost acceptance independently of others.

The prediction is good enough to rank candidates, and too optimistic as a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import expected_speedup
from skipsearch.errors import SearchError
from skipsearch.searchers.base import SearchProblem

MIN_ALPHA = 1e-6  # an acceptance measured as 0 becomes a large loss, not an infinite one


def log_losses(problem: SearchProblem, alpha: Sequence[float]) -> tuple[float, ...]:
    """Return -log α of each unit. alpha: α of the draft that skips each sub-layer alone.

    The losses of units add up if units lose acceptance independently.
    Raises: SearchError if there are not as many values as sub-layers.
    """
    if len(alpha) != 2 * problem.n_layers:
        raise SearchError(
            f"evidence.single_skip_acceptance has {len(alpha)} values for {2 * problem.n_layers} "
            "sub-layers; is it another model's?"
        )
    return tuple(
        sum(-math.log(min(1.0, max(MIN_ALPHA, alpha[s]))) for s in unit) for unit in problem.units
    )


def independent_alpha(problem: SearchProblem, mask: SkipMask, loss: Sequence[float]) -> float:
    """Return α of a mask, on the assumption that each skipped unit multiplies it by a factor.

    loss: -log of the factors, as `log_losses` returns them.
    """
    return math.exp(-sum(loss[u] for u in problem.units_of(mask) or ()))


def costs_or_uniform(problem: SearchProblem) -> Costs:
    """Return the measured costs, or uniform costs if none were measured.

    With uniform costs, all sub-layers cost the same, and a verify pass costs one full pass.
    """
    n = 2 * problem.n_layers
    return problem.evidence.costs or Costs(
        sublayers=(1.0,) * n, overhead=0.0, verify=(float(n),) * 9
    )


def verify_ratio(costs: Costs, draft_length: int) -> float:
    """Return v: the time of a pass over draft_length + 1 tokens over that of a one-token pass."""
    return costs.verify[draft_length] / costs.verify[0]


def draft_ratio(costs: Costs, mask: SkipMask) -> float:
    """Return β of a mask: the time of a draft step over that of a pass over one token."""
    return costs.draft_step_seconds(mask) / costs.verify[0]


def predicted_speedup(mask: SkipMask, alpha: float, costs: Costs) -> float:
    """Return the speedup at the best draft length between 1 and the longest that was measured.

    Length 0 (speedup 1) is excluded, so that masks that do not pay can still be compared.
    """
    beta, rounds = draft_ratio(costs, mask), costs.round_seconds(mask, len(costs.verify) - 1)
    return max(
        expected_speedup(alpha, g, beta, rounds[g] / costs.verify[0] - g * beta)
        for g in range(1, len(rounds))
    )
