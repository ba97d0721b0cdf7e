"""`gp`: a Gaussian process on the bits, inside a trust region."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from skipsearch.core.mask import SkipMask
from skipsearch.searchers import SearchProblem, make_searcher
from skipsearch.searchers.gp import INITIAL_RANDOM
from skipsearch.searchers.history import Observation
from skipsearch.searchers.region import GROW_AFTER, SHRINK_AFTER, trust_region

from .toy import HiddenMask, ToyModel, drive


def judged(*scores: tuple[Iterable[int], float]) -> list[Observation]:
    return [Observation(frozenset(units), log_time, 1e-6) for units, log_time in scores]


def test_the_region_lies_around_the_best_mask_told() -> None:
    region = trust_region(judged(({1}, 0.5), ({2}, 0.1), ({3}, math.inf)), n_units=32)
    assert (region.centre, region.radius) == ({2}, 8)


def test_improvements_in_a_row_let_the_region_grow() -> None:
    steps = judged(*((range(k), -0.1 * k) for k in range(GROW_AFTER + 1)))
    assert trust_region(steps, n_units=32).radius == 16


def test_disappointments_in_a_row_shrink_it() -> None:
    flips = [({u}, 1.0) for u in range(SHRINK_AFTER)]
    assert trust_region(judged(((), 0.0), *flips), n_units=32).radius == 4


def test_masks_told_from_far_away_do_not_resize_it() -> None:
    far = [(set(range(12)) | {12 + u}, 1.0) for u in range(2 * SHRINK_AFTER)]
    assert trust_region(judged(((), 0.0), *far), n_units=32).radius == 8


def test_a_region_searched_out_is_closed_and_the_next_opens_around_the_best_mask_outside_it() -> (
    None
):
    elsewhere = (set(range(20)), 0.5)
    rounds = 4  # radius 8, 4, 2, 1
    flips = [({u}, 1.0) for _ in range(rounds) for u in range(SHRINK_AFTER)]
    region = trust_region(judged(((), 0.0), elsewhere, *flips), n_units=32)
    assert (region.centre, region.radius) == (set(range(20)), 8)


def test_with_every_told_mask_searched_out_the_region_is_anywhere() -> None:
    flips = [({u}, 1.0) for _ in range(4) for u in range(SHRINK_AFTER)]
    assert trust_region(judged(((), 0.0), *flips), n_units=32).centre is None


def test_gp_goes_on_from_what_other_searchers_found() -> None:
    toy = ToyModel.random(6, seed=3)
    searcher = make_searcher("gp", toy.problem())
    seeds = [
        trial
        for name in ("middle", "uniform")
        for trial in drive(make_searcher(name, toy.problem()), toy, 8)
    ]
    for trial in seeds:
        searcher.tell(trial)
    best_seed = min(seeds, key=lambda trial: trial.seconds_per_token)
    found = drive(searcher, toy, 10)
    assert min(trial.seconds_per_token for trial in found) < best_seed.seconds_per_token
    assert all(len(trial.mask.sublayers ^ best_seed.mask.sublayers) <= 8 for trial in found[:1])


def test_gp_starts_with_random_masks_when_it_knows_too_little() -> None:
    toy = ToyModel.random(4)
    start = [
        trial.mask for trial in drive(make_searcher("gp", toy.problem(seed=4)), toy, INITIAL_RANDOM)
    ]
    assert start == [
        trial.mask
        for trial in drive(make_searcher("random", toy.problem(seed=4)), toy, INITIAL_RANDOM)
    ]


def test_gp_is_not_led_astray_by_noise_that_it_is_told_of() -> None:
    """Each time is off by 10 %, and says so: the search still comes near the best mask."""
    toy, rng = HiddenMask.random(n_layers=5, seed=4), np.random.default_rng(0)
    searcher = make_searcher("gp", SearchProblem(5))
    masks: list[SkipMask] = []
    for _ in range(30):
        mask = searcher.ask()
        assert mask is not None
        masks.append(mask)
        exact = toy.trial(mask)
        searcher.tell(
            replace(
                exact,
                seconds_per_token=exact.seconds_per_token * math.exp(0.1 * rng.standard_normal()),
                stderr=0.1 * exact.seconds_per_token,
            )
        )
    assert np.mean([toy.regret(mask) for mask in masks[-8:]]) < 0.5 * np.mean(
        [toy.regret(mask) for mask in masks[:10]]
    )


def test_gp_finds_the_one_mask_that_is_left() -> None:
    toy = HiddenMask.random(n_layers=2, seed=0)
    searcher = make_searcher("gp", SearchProblem(2))
    left = toy.target if toy.target.n_skipped else SkipMask(2, attn=(0,))
    for bits in range(1, 16):
        mask = SkipMask.from_bits([bits >> s & 1 for s in range(4)])
        if mask != left:
            searcher.tell(toy.trial(mask))
    assert searcher.ask() == left
    assert searcher.ask({left}) is None
