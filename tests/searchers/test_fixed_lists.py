"""Searchers that know their masks beforehand: `random`, `middle`, `uniform`, `sensitivity` and
their kind.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, expected_speedup
from skipsearch.searchers import Evidence, SearchProblem, make_searcher
from skipsearch.searchers.fixed_order import coarse_to_fine
from skipsearch.searchers.predictions import draft_ratio, predicted_speedup
from skipsearch.searchers.uniform import evenly_spaced

from .toy import ToyModel


def everything(name: str, problem: SearchProblem) -> list[SkipMask]:
    searcher = make_searcher(name, problem)
    masks: list[SkipMask] = []
    while (mask := searcher.ask()) is not None:
        masks.append(mask)
        searcher.tell(Trial(mask, 1.0))
    return masks


@pytest.mark.parametrize("n", [1, 2, 3, 7, 32, 160])
def test_coarse_to_fine_visits_every_count_once_and_the_middle_first(n: int) -> None:
    counts = coarse_to_fine(n)
    assert sorted(counts) == list(range(1, n + 1))
    assert n < 4 or counts[:3] == (round(n / 2), round(n / 4), round(3 * n / 4))


def test_random_draws_every_mask_once_and_then_ends() -> None:
    masks = everything("random", SearchProblem(3))
    assert len(masks) == len(set(masks)) == 2**6 - 1


def test_random_sees_light_and_heavy_masks_as_often_as_even_ones() -> None:
    searcher = make_searcher("random", SearchProblem(16))
    counts: Counter[int] = Counter()
    for _ in range(320):
        mask = searcher.ask()
        assert mask is not None
        searcher.tell(Trial(mask, 1.0))
        counts[(mask.n_skipped - 1) // 8] += 1
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 40


def test_random_differs_by_seed() -> None:
    assert (
        make_searcher("random", SearchProblem(8, seed=0)).ask()
        != make_searcher("random", SearchProblem(8, seed=1)).ask()
    )


def test_middle_skips_one_run_around_the_middle_of_every_length() -> None:
    masks = everything("middle", SearchProblem(4))
    assert masks[0] == SkipMask.from_sublayers(4, (2, 3, 4, 5))
    assert sorted(mask.n_skipped for mask in masks) == list(range(1, 9))
    for mask in masks:
        run = sorted(mask.sublayers)
        assert run == list(range(run[0], run[-1] + 1))
        assert abs((run[0] + run[-1]) / 2 - 3.5) <= 0.5


def test_middle_closes_ranks_where_a_sublayer_must_stay() -> None:
    assert everything("middle", SearchProblem(4, never_skip=frozenset({3})))[0].sublayers == {
        1,
        2,
        4,
        5,
    }


def test_uniform_skips_every_other_layer_first() -> None:
    assert everything("uniform", SearchProblem(8))[0] == SkipMask.from_layers(8, (1, 3, 5, 7))


def test_uniform_takes_as_many_attentions_as_mlps_at_even_distances() -> None:
    masks = everything("uniform", SearchProblem(8))
    assert sorted(mask.n_skipped for mask in masks) == list(range(1, 17))
    for mask in masks:
        assert len(mask.attn) - len(mask.mlp) in (0, 1)
        gaps = {b - a for a, b in zip(mask.attn, mask.attn[1:], strict=False)}
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_even_spreads_leave_both_ends_room() -> None:
    assert evenly_spaced(12, 3) == (2, 6, 10)
    assert evenly_spaced(5, 0) == ()


def test_sensitivity_skips_the_least_harmful_first() -> None:
    alphas = (0.5, 0.9, 0.99, 0.6, 0.95, 0.7)
    masks = everything(
        "sensitivity", SearchProblem(3, evidence=Evidence(single_skip_acceptance=lambda: alphas))
    )
    by_count = {mask.n_skipped: mask.sublayers for mask in masks}
    assert [by_count[k] for k in range(1, 7)] == [
        {2},
        {2, 4},
        {1, 2, 4},
        {1, 2, 4, 5},
        {1, 2, 3, 4, 5},
        set(range(6)),
    ]


def test_sensitivity_starts_with_half_of_the_model_and_sees_every_count_once() -> None:
    counts = [
        mask.n_skipped for mask in everything("sensitivity", ToyModel.random(8, seed=2).problem())
    ]
    assert counts[0] == 8
    assert sorted(counts) == list(range(1, 17))


def test_sensitivity_lives_with_an_acceptance_of_nought() -> None:
    masks = everything(
        "sensitivity",
        SearchProblem(2, evidence=Evidence(single_skip_acceptance=lambda: (0.0, 0.9, 0.8, 0.0))),
    )
    assert masks[0].sublayers == {1, 2}
    assert len(masks) == 4


def test_a_prediction_is_leviathans_with_the_measured_costs() -> None:
    costs = Costs(sublayers=(1.0, 1.0, 1.0, 1.0), overhead=1.0, verify=(5.0, 5.5, 6.0))
    mask = SkipMask(2, attn=(0,), mlp=(1,))
    assert draft_ratio(costs, mask) == pytest.approx(0.6)
    expected = max(expected_speedup(0.8, 1, 0.6, 1.1), expected_speedup(0.8, 2, 0.6, 1.2))
    assert predicted_speedup(mask, 0.8, costs) == pytest.approx(expected)
    assert math.isclose(expected, 1.8 / 1.7)
