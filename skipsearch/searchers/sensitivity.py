"""`sensitivity`: skip what hurts least when it is skipped alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from skipsearch.core.mask import SkipMask
from skipsearch.searchers.base import SearchProblem, require
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine
from skipsearch.searchers.predictions import log_losses


class Sensitivity(FixedOrderSearcher):
    """A searcher that skips the n least harmful sub-layers, for each n once.

    The harm of a sub-layer is the acceptance that is lost if it is skipped alone. The masks are
    nested. The first one skips half of the model. Masks are not ordered by predicted speedup: the
    prediction takes losses as independent, so drafts with few sub-layers look too good. On the
    embedded model, the mask that skips 39 of 40 sub-layers came first in that order, and its
    measured α was 0.10.

    Raises: SearchError without evidence.single_skip_acceptance.
    Source: one-at-a-time importance, as in the pruning literature (e.g. Michel et al. 2019).
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        measure = require(
            problem.evidence.single_skip_acceptance, "single_skip_acceptance", "sensitivity"
        )
        return _skip_least_harmful(problem, measure)


def _skip_least_harmful(
    problem: SearchProblem, measure: Callable[[], Sequence[float]]
) -> Iterator[SkipMask]:
    loss = log_losses(problem, measure())
    order = sorted(range(len(loss)), key=lambda u: (loss[u], u))
    for count in coarse_to_fine(len(order)):
        yield problem.mask_of(order[:count])
