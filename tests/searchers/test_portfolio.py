"""`auto`: formulas first, then turns of the adaptive searchers by what they gained for their
time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from searchers.toy import HiddenMask, ToyModel, drive
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers import SearchProblem
from skipsearch.searchers.portfolio import ADAPTIVE, FORMULAS, MASKS_PER_TURN, Portfolio

ALL = len(ADAPTIVE) * MASKS_PER_TURN
TOY = ToyModel.random(n_layers=6, seed=2)


class Stub:
    """Proposes fresh masks for ever, or none."""

    def __init__(self, first: int, many: bool = True):
        self.n, self.many = first, many

    def ask(self, pending: object = ()) -> SkipMask | None:
        self.n += 1
        return SkipMask.from_bits([int(b) for b in f"{self.n:016b}"]) if self.many else None

    def tell(self, trial: Trial) -> None:
        pass


def turns(
    gains: dict[str, float], seconds: dict[str, float], masks: int, without: tuple[str, ...] = ()
) -> list[str]:
    """Who proposed each mask, when a mask of a searcher makes decoding `gains` times faster and
    takes `seconds`.
    """
    auto = Portfolio(ToyModel.random(n_layers=8, seed=0).problem())
    auto._searchers = {
        name: Stub(4096 * i, name not in without) for i, name in enumerate(ADAPTIVE, start=1)
    }  # type: ignore[assignment]
    auto._n_judged = dict.fromkeys(auto._searchers, 0)
    best, proposers = 1.0, []
    auto.tell(Trial(SkipMask(8, (1,)), best))
    for _ in range(masks):
        mask = auto.ask()
        assert mask is not None
        proposers.append(auto.proposer)
        best /= 1 + gains.get(auto.proposer, 0.0)
        auto.tell(
            Trial(
                mask, best, searcher=auto.proposer, search_seconds=seconds.get(auto.proposer, 1.0)
            )
        )
    return proposers


def test_each_formula_proposes_its_share_before_anybody_learns() -> None:
    trials = drive(Portfolio(TOY.problem()), TOY, 60)
    names = [t.searcher for t in trials]
    learning = next(i for i, name in enumerate(names) if name in ADAPTIVE)
    assert set(names[:learning]) >= set(FORMULAS) - {"s3d"}, (
        "whose masks the middle has proposed before"
    )
    assert set(names[:learning]) <= set(FORMULAS)
    assert all(names[:learning].count(name) <= most for name, most in FORMULAS.items())
    assert all(name in ADAPTIVE for name in names[learning:])


def test_who_gains_goes_on_and_the_others_have_their_first_turn_when_it_no_longer_does() -> None:
    order = turns({"exchange": 0.02}, {}, 4 * MASKS_PER_TURN)
    assert set(order) == {"exchange"}
    order = turns({}, {}, ALL)
    assert list(dict.fromkeys(order)) == list(ADAPTIVE)


def test_after_the_first_turns_who_gained_most_for_its_time_goes_on() -> None:
    order = turns({"evolution": 0.02, "tpe": 0.01}, {}, 2 * ALL)
    assert Counter(order).most_common(1)[0][0] == "evolution"
    order = turns({"evolution": 0.02, "tpe": 0.01}, {"evolution": 5.0}, 4 * ALL)
    assert Counter(order).most_common(1)[0][0] == "tpe", "half the gain in a fifth of the time"


def test_of_those_that_gain_nothing_the_cheap_one_goes_on() -> None:
    order = turns({}, {"evolution": 0.5}, 3 * ALL)
    assert Counter(order[ALL:]).most_common(1)[0][0] == "evolution"


def test_who_thinks_for_long_proposes_fewer_masks_in_a_turn() -> None:
    order = turns({}, {"gp": 6.0}, ALL)
    began = order.index("gp")
    assert 2 <= next(i for i, name in enumerate(order[began:]) if name != "gp") < MASKS_PER_TURN / 2


def test_nobody_waits_for_ever() -> None:
    order = turns({"exchange": 0.02}, {}, 6 * ALL)
    assert set(order) == set(ADAPTIVE)
    assert Counter(order)["exchange"] > 0.7 * len(order)


def test_who_has_no_idea_left_is_passed_over() -> None:
    order = turns({"gp": 0.5}, {}, ALL, without=("exchange", "gp"))
    assert set(order) == {"evolution", "tpe"}


def test_searchers_whose_evidence_was_not_measured_are_left_out() -> None:
    hidden = HiddenMask.random(n_layers=6, seed=1)
    auto = Portfolio(SearchProblem(6))
    trials = drive(auto, hidden, 30)
    assert len(trials) == 30
    assert not {"clasp", "asd", "sensitivity"} & {t.searcher for t in trials}


def test_trials_of_others_are_learnt_from_and_credited_to_nobody() -> None:
    told, apart = Portfolio(TOY.problem()), Portfolio(TOY.problem())
    for trial in drive(Portfolio(TOY.problem()), TOY, 5):
        told.tell(replace(trial, searcher="somebody"))
    first = told.ask()
    assert first is not None
    assert told.proposer == "clasp"
    assert apart.ask() != first, "what was told is not proposed again"


@pytest.mark.parametrize("seed", [0, 1])
def test_it_finds_what_one_of_its_searchers_finds(seed: int) -> None:
    hidden = HiddenMask.random(n_layers=6, seed=seed)
    best = min(t.seconds_per_token for t in drive(Portfolio(SearchProblem(6)), hidden, 150))
    assert best == pytest.approx(hidden.trial(hidden.target).seconds_per_token, rel=0.02)
