"""`clasp`: a dynamic programme over hidden states that keeps the draft's residual stream close to
the full model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest

from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.clasp.dynamic_program import DPStep, LayerProbe, solve_mean_and_votes
from skipsearch.errors import SearchError
from skipsearch.searchers.base import SearchProblem, require
from skipsearch.searchers.fixed_order import FixedOrderSearcher, coarse_to_fine


class CLaSpSearcher(FixedOrderSearcher):
    """For every number of skipped layers, and of skipped sub-layers, those whose absence turns the
    hidden states least.

    D(i, j) = max{cos(h_i, g(i-1, j-1)), cos(h_i, f_i(g(i-1, j)))}: the state after i layers with j
    of them skipped either leaves layer i out or runs it, whichever stays nearer to the full model's
    h_i. The paper runs this on one token while decoding. Here it runs on all positions of the
    calibration text, and one set for all comes out in two ways: every (i, j) decided for all
    positions together by their mean cosine ("shared"), or each position deciding for itself and the
    layers it skips most often taken ("counted"). Each is done on layers, as in the paper, and on
    sub-layers where attention and MLP follow one another (in a parallel residual neither has a
    state of its own behind it). Counts go coarse to fine, the four ways in turn. Raises:
    SearchError without evidence.states or evidence.probe, and from the first `ask` if the two do
    not belong together. Source: CLaSp, eq. 2 and algorithm 1."""

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        states = require(problem.evidence.states, "states", "clasp")
        probe = require(problem.evidence.probe, "probe", "clasp")
        return _sweep_counts(problem, states, probe)


def layer_steps(problem: SearchProblem) -> list[DPStep]:
    return [
        DPStep(i, True, True, not problem.never_skip & {2 * i, 2 * i + 1})
        for i in range(problem.n_layers)
    ]


def sublayer_steps(problem: SearchProblem) -> list[DPStep]:
    return [
        DPStep(s // 2, not s % 2, bool(s % 2), s not in problem.never_skip)
        for s in range(2 * problem.n_layers)
    ]


def _sweep_counts(problem: SearchProblem, states: Tensor, probe: LayerProbe) -> Iterator[SkipMask]:
    by_layer = solve_mean_and_votes(states, layer_steps(problem), probe)
    if by_layer is None:
        raise SearchError(
            "evidence.probe does not lead from one of evidence.states to the next; take both from "
            "the same full pass"
        )
    by_sublayer = (
        None
        if problem.whole_layers
        else solve_mean_and_votes(states, sublayer_steps(problem), probe)
    )
    ways = [
        [
            SkipMask.from_sublayers(problem.n_layers, skipped(count))
            for count in coarse_to_fine(programme.n_skippable)
        ]
        for programme in (by_sublayer, by_layer)
        if programme
        for skipped in (programme.solve_by_mean, programme.solve_by_votes)
    ]
    yield from (mask for mask in chain.from_iterable(zip_longest(*ways)) if mask is not None)
