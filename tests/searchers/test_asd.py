"""`asd`: cosine thresholds and two rules, as the paper's Algorithm 1 has them."""

from __future__ import annotations

import pytest

from skipsearch.core.mask import SkipMask
from skipsearch.searchers import Evidence, SearchProblem, make_searcher
from skipsearch.searchers.asd import asd_mask

from .toy import ToyModel, drive

# attention cosines rise over 8 layers; no MLP is dropped for its cosine, however high
COSINES = tuple(c for i in range(8) for c in (0.90 + 0.0125 * i, 0.999))
PROBLEM = SearchProblem(8, evidence=Evidence(cosines=COSINES))


def mask_of(threshold: float, m: int, n: int, problem: SearchProblem = PROBLEM) -> SkipMask:
    return problem.mask_of(asd_mask(problem, COSINES, threshold, m, n))


def test_attentions_at_or_above_the_threshold_are_dropped() -> None:
    assert mask_of(0.95, m=0, n=0) == SkipMask(8, attn=(4, 5, 6, 7))


def test_rule_1_drops_every_mth_attention_and_mlp_counted_from_one() -> None:
    assert mask_of(1.1, m=3, n=0) == SkipMask.from_layers(8, (2, 5))


def test_rule_2_keeps_the_last_n_layers_from_both() -> None:
    assert mask_of(0.95, m=2, n=2) == SkipMask(8, attn=(1, 3, 4, 5), mlp=(1, 3, 5))


def test_a_whole_layer_search_drops_layers_whose_attention_and_mlp_both_reach_the_threshold() -> (
    None
):
    whole = SearchProblem(8, evidence=Evidence(cosines=COSINES), whole_layers=True)
    assert mask_of(0.95, m=0, n=0, problem=whole) == SkipMask.from_layers(8, (4, 5, 6, 7))


def test_the_papers_own_setting_comes_first() -> None:
    assert make_searcher("asd", PROBLEM).ask() == mask_of(0.985, m=3, n=2)


@pytest.mark.parametrize("count", range(1, 9))
def test_the_sweep_has_every_number_of_attentions_that_a_threshold_can_drop(count: int) -> None:
    masks = [trial.mask for trial in drive(make_searcher("asd", PROBLEM), ToyModel.random(8), 200)]
    assert SkipMask(8, attn=tuple(range(8 - count, 8))) in masks
