"""What every searcher owes the driver. A searcher is tested here the moment its line stands in
SEARCHERS.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers import SEARCHERS, Searcher, SearchProblem, make_searcher

from .toy import HiddenMask, ToyModel, drive, failure, slowed

every_searcher = pytest.mark.parametrize("name", SEARCHERS)

TOY = ToyModel.random(n_layers=4, seed=1)
ENOUGH = 15  # evaluations: past every searcher's start, so that its own way of proposing is seen


@cache
def one_search(name: str) -> tuple[Trial, ...]:
    """A search that several tests look at."""
    return tuple(drive(make_searcher(name, TOY.problem(seed=3)), TOY, ENOUGH))


def proposals(searcher: Searcher, evaluations: int = ENOUGH) -> list[SkipMask]:
    return [trial.mask for trial in drive(searcher, TOY, evaluations)]


@every_searcher
def test_proposes_masks_of_this_model_that_skip_something(name: str) -> None:
    masks = [trial.mask for trial in one_search(name)]
    assert masks
    assert all(mask.n_layers == TOY.n_layers and mask.n_skipped for mask in masks)


@every_searcher
def test_never_proposes_a_mask_twice(name: str) -> None:
    masks = [trial.mask for trial in one_search(name)]
    assert len(set(masks)) == len(masks)


@every_searcher
def test_never_skips_what_must_not_be_skipped(name: str) -> None:
    never = frozenset({0, 3, 7})
    masks = proposals(make_searcher(name, TOY.problem(never_skip=never)))
    assert masks
    assert not any(mask.sublayers & never for mask in masks)


@every_searcher
def test_skips_only_whole_layers_when_asked_to(name: str) -> None:
    masks = proposals(
        make_searcher(name, TOY.problem(whole_layers=True, never_skip=frozenset({1})))
    )
    assert masks
    assert all(mask.attn == mask.mlp and 0 not in mask.attn for mask in masks)


@every_searcher
def test_the_same_seed_and_tells_give_the_same_proposals(name: str) -> None:
    assert proposals(make_searcher(name, TOY.problem(seed=3))) == [
        trial.mask for trial in one_search(name)
    ]


@every_searcher
def test_telling_everything_again_resumes_the_search(name: str) -> None:
    *told, last = one_search(name)
    resumed = make_searcher(name, TOY.problem(seed=3))
    for trial in told:
        resumed.tell(trial)
    assert resumed.ask() == last.mask


@every_searcher
def test_learns_from_masks_that_others_proposed_and_does_not_repeat_them(name: str) -> None:
    foreign = proposals(make_searcher(name, TOY.problem()), 8) + proposals(
        make_searcher("random", TOY.problem(seed=9)), 8
    )
    searcher = make_searcher(name, TOY.problem())
    for mask in foreign:
        searcher.tell(TOY.trial(mask))
    assert not set(proposals(searcher, 3)) & set(foreign)


@every_searcher
def test_goes_on_after_the_masks_with_which_a_search_begins(name: str) -> None:
    """`tune` has 20 masks of others judged first; after them a learner follows its own rule."""
    first = drive(make_searcher("random", TOY.problem(seed=9)), TOY, 20)

    def go_on() -> list[SkipMask]:
        searcher = make_searcher(name, TOY.problem())
        for trial in first:
            searcher.tell(trial)
        return proposals(searcher, 5)

    masks = go_on()
    assert masks
    assert all(mask.n_layers == TOY.n_layers and mask.n_skipped for mask in masks)
    assert len({*masks, *(trial.mask for trial in first)}) == len(masks) + len(first)
    assert go_on() == masks


@every_searcher
def test_accepts_masks_that_it_would_never_propose(name: str) -> None:
    searcher = make_searcher(name, TOY.problem(never_skip=frozenset({0}), whole_layers=True))
    for mask in (SkipMask(4), SkipMask(4, attn=(0,)), SkipMask(4, mlp=(2,))):
        searcher.tell(TOY.trial(mask))
    assert proposals(searcher, 2)


@every_searcher
def test_a_fast_mask_that_skips_nothing_does_not_end_the_search(name: str) -> None:
    """`tune` may judge it first: drafts that read fewer bits of everything."""
    searcher = make_searcher(name, TOY.problem())
    nothing = TOY.trial(SkipMask(4))
    searcher.tell(replace(nothing, seconds_per_token=nothing.seconds_per_token / 100))
    assert len(proposals(searcher, 2)) == 2


@every_searcher
def test_masks_being_judged_elsewhere_are_left_alone(name: str) -> None:
    searcher = make_searcher(name, TOY.problem())
    drive(searcher, TOY, 11)
    pending: set[SkipMask] = set()
    while len(pending) < 4 and (mask := searcher.ask(pending)) is not None:
        assert mask not in pending
        pending.add(mask)


@every_searcher
def test_a_mask_whose_worker_died_is_proposed_again(name: str) -> None:
    searcher = make_searcher(name, TOY.problem())
    first = searcher.ask()
    assert first is not None
    assert searcher.ask({first}) != first
    assert searcher.ask() == first


@every_searcher
def test_survives_failed_and_infinite_and_senseless_trials(name: str) -> None:
    searcher = make_searcher(name, TOY.problem())
    seen: set[SkipMask] = set()
    for n in range(ENOUGH):
        mask = searcher.ask()
        if mask is None:
            break
        assert mask not in seen
        seen.add(mask)
        good = TOY.trial(mask)
        endless, senseless = (
            replace(good, seconds_per_token=value, stderr=value) for value in (math.inf, math.nan)
        )
        searcher.tell((good, failure(mask), endless, senseless)[n % 4])
    assert seen


@every_searcher
def test_survives_a_model_on_which_everything_fails(name: str) -> None:
    searcher = make_searcher(name, TOY.problem())
    for _ in range(ENOUGH):
        if (mask := searcher.ask()) is None:
            break
        searcher.tell(failure(mask))


@every_searcher
def test_survives_times_that_are_all_alike(name: str) -> None:
    searcher = make_searcher(name, TOY.problem())
    for _ in range(ENOUGH):
        if (mask := searcher.ask()) is None:
            break
        searcher.tell(replace(TOY.trial(mask), seconds_per_token=0.01, stderr=0.0))


@every_searcher
def test_ends_when_there_is_nothing_left_to_propose(name: str) -> None:
    tiny = ToyModel.random(n_layers=2)
    searcher = make_searcher(name, tiny.problem())
    masks = [trial.mask for trial in drive(searcher, tiny, 2**4 + 1)]
    assert len(masks) <= 2**4 - 1
    assert searcher.ask() is None


@every_searcher
def test_works_on_the_smallest_search_there_is(name: str) -> None:
    smallest = ToyModel.random(n_layers=1)
    searcher = make_searcher(name, smallest.problem(never_skip=frozenset({1})))
    assert {trial.mask for trial in drive(searcher, smallest, 3)} <= {SkipMask(1, attn=(0,))}


@every_searcher
def test_leaves_the_global_random_state_and_thread_count_alone(name: str) -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    proposals(make_searcher(name, TOY.problem()), 12)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@every_searcher
def test_wall_times_told_among_replayed_ones_do_not_mislead(name: str) -> None:
    """Another clock: every wall time here is ten times its replay, so mixed up they would look like
    bad masks.
    """
    plain, mixed = (make_searcher(name, TOY.problem()) for _ in range(2))
    for trial in drive(make_searcher("random", TOY.problem(seed=5)), TOY, 14):
        plain.tell(trial)
        mixed.tell(trial)
        if trial.speedup and trial.speedup > 1:
            mixed.tell(slowed(replace(trial, fidelity="wall"), 10))
    assert proposals(plain, 2) == proposals(mixed, 2)


@pytest.mark.parametrize(
    ("name", "evaluations"), [("gp", 30), ("exchange", 60), ("evolution", 60), ("tpe", 60)]
)
def test_adaptive_searchers_clearly_beat_random_whatever_the_best_mask_is(
    name: str, evaluations: int
) -> None:
    """The best mask is drawn at random, bit by bit, so a bias towards skipping or keeping cannot
    pass for learning.
    """

    def regret(searcher: str) -> float:
        total = 0.0
        for seed in range(2):
            toy = HiddenMask.random(n_layers=6, seed=seed)
            trials = drive(make_searcher(searcher, SearchProblem(6, seed=seed)), toy, evaluations)
            total += min(toy.regret(trial.mask) for trial in trials)
        return total

    assert regret(name) < 0.5 * regret("random")
