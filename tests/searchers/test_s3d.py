"""`s3d`: the paper's formulas, the fit, and the courage to say "don't"."""

from __future__ import annotations

import pytest

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, expected_speedup
from skipsearch.searchers import Evidence, Searcher, SearchProblem
from skipsearch.searchers.predictions import draft_ratio
from skipsearch.searchers.s3d import N_PROBES, S3DSearcher, acceptance_from_beta, fit_u

from .toy import failure

COSTS = Costs(
    sublayers=(1.0,) * 32, overhead=0.0, verify=tuple(32.0 + 0.3 * rows for rows in range(9))
)
PROBLEM = SearchProblem(16, evidence=Evidence(costs=COSTS))


def measure(searcher: Searcher, u: float, evaluations: int) -> list[SkipMask]:
    """Ask and tell on a model whose acceptance is the formula's own."""
    masks: list[SkipMask] = []
    while len(masks) < evaluations and (mask := searcher.ask()) is not None:
        beta = draft_ratio(COSTS, mask)
        searcher.tell(
            Trial(mask, 1.0, fidelity="replay", alpha=acceptance_from_beta(beta, u), beta=beta)
        )
        masks.append(mask)
    return masks


def test_acceptance_is_equation_10() -> None:
    assert (
        acceptance_from_beta(0.5, 0.01)
        == pytest.approx((1 - 0.01**0.5) / (1 - 0.01))
        == pytest.approx(0.909, abs=1e-3)
    )


@pytest.mark.parametrize("u", [1e-9, 0.01, 1.0, 50.0, 1e9])
def test_the_whole_model_is_always_right_and_no_model_never(u: float) -> None:
    assert acceptance_from_beta(1.0, u) == pytest.approx(1)
    assert acceptance_from_beta(0.0, u) == 0
    assert acceptance_from_beta(0.4, 1.0) == 0.4


def test_u_below_one_predicts_more_acceptance_than_cost_and_u_above_one_less() -> None:
    assert acceptance_from_beta(0.5, 0.01) > 0.5 > acceptance_from_beta(0.5, 100)


@pytest.mark.parametrize("u", [1e-6, 0.01, 0.9, 3.0, 1e5])
def test_the_fit_finds_u_again_on_both_sides_of_one(u: float) -> None:
    points = [(beta, acceptance_from_beta(beta, u)) for beta in (0.25, 0.5, 0.75)]
    assert fit_u(points) == pytest.approx(u, rel=0.01)


def test_s3d_probes_a_half_a_quarter_and_three_quarters_first() -> None:
    masks = measure(S3DSearcher(PROBLEM), u=1e-8, evaluations=N_PROBES)
    assert [mask.n_skipped for mask in masks] == [16, 8, 24]


def test_s3d_then_proposes_what_maximises_the_factor_and_its_neighbours() -> None:
    searcher = S3DSearcher(PROBLEM)
    measure(searcher, u=1e-8, evaluations=N_PROBES)
    best = searcher.forecast()[0]
    by_hand = max(
        (
            expected_speedup(
                acceptance_from_beta(1 - k / 32, 1e-8), g, 1 - k / 32, COSTS.verify[g] / 32
            ),
            k,
            g,
        )
        for k in range(1, 33)
        for g in range(1, 9)
    )
    assert (best.count, best.draft_length) == by_hand[1:]
    counts = [mask.n_skipped for mask in measure(searcher, u=1e-8, evaluations=4)]
    assert counts[0] == best.count or best.count in (8, 16, 24)
    assert max(abs(count - best.count) for count in counts) <= 4


def test_s3d_says_dont_where_acceptance_stays_below_cost() -> None:
    assert len(measure(S3DSearcher(PROBLEM), u=100.0, evaluations=10)) == N_PROBES


def test_s3d_says_dont_when_no_probe_could_be_measured() -> None:
    searcher = S3DSearcher(PROBLEM)
    for _ in range(N_PROBES):
        mask = searcher.ask()
        assert mask is not None
        searcher.tell(failure(mask))
    assert searcher.ask() is None


def test_s3d_needs_no_probes_where_somebody_measured_middle_masks_already() -> None:
    searcher = S3DSearcher(PROBLEM)
    measured = measure(S3DSearcher(PROBLEM), u=1e-8, evaluations=N_PROBES)
    for mask in measured:
        searcher.tell(Trial(mask, 1.0, alpha=acceptance_from_beta(draft_ratio(COSTS, mask), 1e-8)))
    following = searcher.ask()
    assert following is not None
    assert following not in measured


def test_s3d_learns_nothing_from_masks_off_its_curve() -> None:
    searcher = S3DSearcher(PROBLEM)
    searcher.tell(Trial(SkipMask(16, attn=(0, 15)), 1.0, alpha=0.01))
    assert searcher.forecast() == []


def test_s3d_goes_on_while_its_probes_are_measured_elsewhere() -> None:
    searcher = S3DSearcher(PROBLEM)
    pending: set[SkipMask] = set()
    for _ in range(N_PROBES + 2):
        mask = searcher.ask(pending)
        assert mask is not None
        pending.add(mask)
    assert len(pending) == N_PROBES + 2
