"""The order of masks in a search of one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers.four_workers import TOY

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.tuning import search_loop
from skipsearch.tuning.events import ignore_event
from skipsearch.tuning.search_loop import Search


@pytest.mark.parametrize(("limit_s", "n_initial"), [(4.0, 3), (20.0, 6), (100.0, 11), (None, 11)])
def test_the_initial_design_takes_at_most_a_quarter_of_the_time(
    limit_s: float | None, n_initial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def judge(mask: SkipMask) -> Trial:
        clock[0] += 1.0
        return TOY.trial(mask)

    monkeypatch.setattr(search_loop, "perf_counter", lambda: clock[0])
    objective = SimpleNamespace(fidelity="replay", judge=judge)
    search = Search(TOY.problem(), objective, None, (), ignore_event, 0.0, limit_s, 24)
    search.run("random")
    proposers = [trial.searcher for trial in search.judged_trials.values()]
    n_others = len([name for name in proposers if name != "random"])
    assert proposers[n_others:] == ["random"] * (len(proposers) - n_others)
    assert n_others == n_initial
