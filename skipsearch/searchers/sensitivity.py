"""`sensitivity`: skip what hurts least when it is skipped alone."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem, require
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine
from skipsearch.searchers.predictions import log_losses


class Sensitivity(FixedOrderSearcher):
    """Ranks sub-layers by the acceptance lost without each alone and skips the least harmful 1, 2,
    3, … of them.

    The masks are nested, one for each number, half of the model first. They are not ordered by
    predicted speedup. If losses are taken as independent, drafts with few sub-layers look too good:
    on the embedded model, skipping 39 of 40 came first, which measured α 0.10.

    Raises: SearchError without evidence.single_skip_acceptance.
    Source: one-at-a-time importance, as in the pruning literature (e.g. Michel et al. 2019).
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        loss = log_losses(
            problem,
            require(
                problem.evidence.single_skip_acceptance, "single_skip_acceptance", "sensitivity"
            ),
        )
        order = sorted(range(len(loss)), key=lambda u: (loss[u], u))
        return (problem.mask_of(order[:count]) for count in coarse_to_fine(len(order)))
