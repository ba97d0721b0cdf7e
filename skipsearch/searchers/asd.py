"""`asd`: skip sub-layers that hardly turn the residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.asd.rule import is_skipped
from skipsearch.searchers.base import SearchProblem, require
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine

PAPER_THRESHOLD = 0.985
# (m, n) of rules 1 and 2: the paper's, the paper's for CodeLlama, a denser and a sparser one, and
# the threshold alone (m = 0).
PERIOD_RULES = ((3, 2), (4, 3), (2, 1), (6, 5), (0, 0))


class ASDSearcher(FixedOrderSearcher):
    """A searcher that skips attentions that hardly turn the residual stream (cosine >= threshold).

    It also skips every m-th layer. It skips nothing in the last n layers. The paper's setting
    (0.985, m = 3, n = 2) comes first. Then come all thresholds that give different masks, coarse to
    fine, each with five pairs (m, n). Cosines are means over calibration text, while the paper
    takes those of each prompt. In a whole-layer search, attention and MLP of a layer must both
    reach the threshold.

    Raises: SearchError without evidence.cosines.
    Source: ADMG (Metel et al. 2024, algorithm 1, table 2).
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        cosines = require(problem.evidence.cosines, "cosines", "asd")
        return (problem.mask_of(units) for units in _sweep_thresholds(problem, cosines))


def _sweep_thresholds(problem: SearchProblem, cosines: Sequence[float]) -> Iterator[set[int]]:
    """Yield the skipped units of each mask, for all thresholds and all (m, n)."""
    thresholds = sorted(
        {_min_cosine(cosines, unit) for unit in problem.units if not unit[0] % 2}, reverse=True
    )
    for threshold in (
        PAPER_THRESHOLD,
        *(thresholds[count - 1] for count in coarse_to_fine(len(thresholds))),
    ):
        for m, n in PERIOD_RULES:
            yield asd_mask(problem, cosines, threshold, m, n)


def asd_mask(
    problem: SearchProblem, cosines: Sequence[float], threshold: float, every: int, keep_last: int
) -> set[int]:
    """Return the skipped units by threshold and period.

    Among layers l = 1 … L - n, these are the attentions with C_l >= threshold, and the attention
    and MLP of each layer l = j·m.
    every: m; 0: skip by the threshold alone.
    keep_last: n.
    """
    return {
        u
        for u, unit in enumerate(problem.units)
        if is_skipped(
            unit[0] // 2,
            problem.n_layers,
            None if unit[0] % 2 else _min_cosine(cosines, unit),
            threshold,
            every,
            keep_last,
        )
    }


def _min_cosine(cosines: Sequence[float], unit: Sequence[int]) -> float:
    return min(cosines[s] for s in unit)
