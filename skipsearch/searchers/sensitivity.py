"""`sensitivity`: skip what hurts least when it is skipped alone."""

from __future__ import annotations

from collections.abc import Iterator

from skipsearch.mask import SkipMask
from skipsearch.searchers.base import SearchProblem, required
from skipsearch.searchers.predict import losses
from skipsearch.searchers.ranked import RankedSearcher, coarse_to_fine


class Sensitivity(RankedSearcher):
    """Ranks sub-layers by the acceptance lost without each alone and skips the least harmful 1, 2, 3, … of them.

    Nested masks, every count once, half of the model first. Not by predicted speedup: taking the losses as independent flatters thin
    drafts (on the embedded model it put 39 of 40 sub-layers first, which measured α 0.10).
    Raises: SearchError without evidence.acceptance_without.
    Source: one-at-a-time importance, as in the pruning literature (e.g. Michel et al. 2019).
    """

    def masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        loss = losses(problem, required(problem.evidence.acceptance_without, "acceptance_without", "sensitivity"))
        order = sorted(range(len(loss)), key=lambda u: (loss[u], u))
        return (problem.mask_of(order[:count]) for count in coarse_to_fine(len(order)))
