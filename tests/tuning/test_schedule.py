"""A budget is divided among the stages; one that begins late still gets a share."""

from __future__ import annotations

import pytest

from skipsearch.tuning import schedule
from skipsearch.tuning.calibration import FEWEST_TEXTS, MIN_TEXTS, choose_limits
from skipsearch.tuning.events import LongestDecoding
from skipsearch.tuning.schedule import LEAST_SHARE, RACE_END, SEARCH_END, TEXT_END, Schedule


@pytest.mark.parametrize(
    ("elapsed_s", "end", "left_s"),
    [
        (0.0, TEXT_END, 120.0),
        (90.0, TEXT_END, 60.0),
        (90.0, SEARCH_END, 210.0),
        (500.0, SEARCH_END, LEAST_SHARE * 600),
        (500.0, 1.0, 100.0),
        (900.0, 1.0, LEAST_SHARE * 600),
    ],
)
def test_a_stage_ends_at_its_share_of_the_budget(
    elapsed_s: float, end: float, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "perf_counter", lambda: 1000.0 + elapsed_s)
    assert Schedule(600.0, 1000.0).seconds_until(end) == pytest.approx(left_s)


def test_parts_of_a_stage_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "perf_counter", lambda: 1000.0)
    left_s = Schedule(600.0, 1000.0).seconds_until(SEARCH_END, n_parts=2, reserved_s=20.0)
    assert left_s == pytest.approx(130.0)
    assert Schedule(600.0, 1000.0).seconds_until(SEARCH_END, n_parts=9) == LEAST_SHARE * 600


def test_without_a_budget_a_stage_takes_as_long_as_it_needs() -> None:
    assert Schedule(None, 0.0).seconds_until(TEXT_END) is None


def test_the_stages_follow_each_other() -> None:
    assert 0 < TEXT_END < SEARCH_END < RACE_END < 1


@pytest.mark.parametrize(
    ("limit_s", "n_texts"), [(0.1, FEWEST_TEXTS), (30.0, 6), (50.0, 10), (1000.0, MIN_TEXTS)]
)
def test_a_short_budget_writes_fewer_texts(limit_s: float, n_texts: int) -> None:
    ten_seconds_a_text = LongestDecoding(0.03, 1.0, n_prompt=50, n_texts=9, n_tokens=300)
    assert choose_limits(ten_seconds_a_text, limit_s, 60.0).min_texts == n_texts
