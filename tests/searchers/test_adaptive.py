"""Searchers that learn as they go: `exchange`, `evolution`, `tpe`. What they share is in
test_conformance, `gp` in test_gp.
"""

from __future__ import annotations

import optuna
import pytest

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers import SearchProblem, make_searcher
from skipsearch.searchers.evolution import Evolution

from .toy import HiddenMask, ToyModel, drive


@pytest.mark.parametrize("seed", range(3))
def test_exchange_ends_at_a_mask_that_no_flip_or_exchange_improves(seed: int) -> None:
    toy = ToyModel.random(4, seed)
    found = drive(make_searcher("exchange", toy.problem()), toy, 300)
    best = min(found, key=lambda trial: trial.seconds_per_token)
    flips = [(s,) for s in range(8)] + [
        (s, t) for s in best.mask.sublayers for t in set(range(8)) - best.mask.sublayers
    ]
    assert len(found) < 300
    assert all(
        toy.trial(best.mask.flip(*flip)).seconds_per_token >= best.seconds_per_token
        for flip in flips
    )


def test_exchange_mends_a_better_mask_that_somebody_else_found() -> None:
    toy = HiddenMask.random(n_layers=4, seed=2)
    near = toy.target.flip(0, 5)
    searcher = make_searcher("exchange", SearchProblem(4))
    searcher.tell(toy.trial(near))
    found = drive(searcher, toy, 100)
    assert toy.target in {trial.mask for trial in found}


def test_exchange_first_swaps_the_two_whose_flips_measured_best() -> None:
    best, times = (
        SkipMask.from_sublayers(4, [0, 1, 2, 3]),
        {0: 1.2, 1: 1.1, 2: 1.02, 3: 1.3, 4: 1.1, 5: 1.05, 6: 1.2, 7: 1.3},
    )
    searcher = make_searcher("exchange", SearchProblem(4))
    searcher.tell(Trial(best, 1.0))
    for flipped, time in times.items():
        searcher.tell(Trial(best.flip(flipped), time))
    assert searcher.ask() == best.flip(2, 5)


def test_exchange_remembers_a_flip_of_an_earlier_best_mask() -> None:
    first, second = SkipMask.from_sublayers(3, [0, 1]), SkipMask.from_sublayers(3, [0, 1, 2])
    searcher = make_searcher("exchange", SearchProblem(3))
    for mask, time in (
        (first, 1.0),
        (first.flip(5), 1.01),
        (first.flip(4), 1.4),
        (second, 0.9),
        (second.flip(3), 0.95),
    ):
        searcher.tell(Trial(mask, time))
    assert searcher.ask() == second.flip(5)


def test_several_workers_of_exchange_never_wait_for_each_other() -> None:
    searcher = make_searcher("exchange", SearchProblem(4))
    searcher.tell(Trial(SkipMask.from_sublayers(4, [0, 1, 2, 3]), 1.0))
    pending: set[SkipMask] = set()
    for _ in range(20):
        mask = searcher.ask(pending)
        assert mask is not None
        pending.add(mask)
    assert len(pending) == 20


def test_evolution_breeds_from_the_best_alone() -> None:
    """Every good mask skips sub-layer 3 and keeps 4: so does nearly every child, whatever the bad
    ones do.
    """
    searcher = make_searcher("evolution", SearchProblem(8))
    strangers = drive(make_searcher("random", SearchProblem(8, seed=3)), ToyModel.random(8), 100)
    for mask in (trial.mask for trial in strangers):
        good = 3 in mask.sublayers and 4 not in mask.sublayers
        searcher.tell(Trial(mask, 0.01 if good else 0.1))
    assert (
        sum(3 in trial.mask.sublayers and 4 not in trial.mask.sublayers for trial in strangers)
        >= Evolution.min_observed
    )
    pending: set[SkipMask] = set()
    for _ in range(30):
        child = searcher.ask(pending)
        assert child is not None
        pending.add(child)
    assert sum(3 in mask.sublayers and 4 not in mask.sublayers for mask in pending) > 20


def test_tpe_never_repeats_itself_even_when_it_is_sure() -> None:
    """Optuna's sampler alone suggests the one best point over and over."""
    toy = HiddenMask.random(n_layers=3, seed=1)
    masks = [trial.mask for trial in drive(make_searcher("tpe", SearchProblem(3)), toy, 63)]
    assert len(masks) == len(set(masks)) == 63


def test_tpe_starts_its_study_anew_when_what_it_learned_from_changes() -> None:
    toy = HiddenMask.random(n_layers=4, seed=1)
    searcher, fresh = (make_searcher("tpe", SearchProblem(4)) for _ in range(2))
    trials = drive(searcher, toy, 12)
    wall = [
        toy.trial(trial.mask, fidelity="wall")
        for trial in drive(make_searcher("random", SearchProblem(4, seed=8)), toy, 14)
    ]
    for trial in wall:
        searcher.tell(trial)
    for trial in trials + wall:
        fresh.tell(trial)
    assert searcher.ask() == fresh.ask()


def test_tpe_says_nothing_and_leaves_optunas_loudness_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    verbosity = optuna.logging.get_verbosity()
    drive(make_searcher("tpe", SearchProblem(3)), HiddenMask.random(3, 0), 12)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == verbosity
