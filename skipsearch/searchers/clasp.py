"""`clasp`: a dynamic program that keeps the draft's hidden states close to the full model's."""

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
    """A searcher that skips the layers or sub-layers without which hidden states turn least.

    D(i, j) = max{cos(h_i, g(i-1, j-1)), cos(h_i, f_i(g(i-1, j)))}. Here h_i is the full model's
    state after layer i, f_i is layer i, and g(i, j) is the draft's state after i layers of which j
    are skipped. So the draft skips layer i or runs it, whichever stays nearer to h_i.

    The paper runs this for one token during decoding. Here it runs for all positions of the
    calibration text, and two rules make one mask from them. By mean: the mean cosine over positions
    decides every (i, j). By votes: each position decides for itself, and the mask skips the layers
    that most positions skip. Each rule is applied to layers, as in the paper, and to sub-layers.
    Sub-layers need a sequential residual: with a parallel one, there is no state between attention
    and MLP. The four combinations propose masks in turn, each with numbers of skipped layers from
    coarse to fine.

    Raises: SearchError without evidence.states or evidence.probe. The first `ask` raises it if the
    two are of different passes.
    Source: CLaSp, eq. 2 and algorithm 1.
    """

    def list_masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        states = require(problem.evidence.states, "states", "clasp")
        probe = require(problem.evidence.probe, "probe", "clasp")
        return _sweep_counts(problem, states, probe)


def layer_steps(problem: SearchProblem) -> list[DPStep]:
    """Return the steps of the dynamic program on layers."""
    return [
        DPStep(i, True, True, not problem.never_skip & {2 * i, 2 * i + 1})
        for i in range(problem.n_layers)
    ]


def sublayer_steps(problem: SearchProblem) -> list[DPStep]:
    """Return the steps of the dynamic program on sub-layers."""
    return [
        DPStep(s // 2, not s % 2, bool(s % 2), s not in problem.never_skip)
        for s in range(2 * problem.n_layers)
    ]


def _sweep_counts(problem: SearchProblem, states: Tensor, probe: LayerProbe) -> Iterator[SkipMask]:
    """Yield the masks of each rule on layers and on sub-layers, in turn.

    Raises: SearchError if `probe` does not lead from one of `states` to the next.
    """
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
            for count in coarse_to_fine(program.n_skippable)
        ]
        for program in (by_sublayer, by_layer)
        if program
        for skipped in (program.solve_by_mean, program.solve_by_votes)
    ]
    yield from (mask for mask in chain.from_iterable(zip_longest(*ways)) if mask is not None)
