"""A study is read as it stands, whoever wrote it and however far it came, and reading it leaves no
trace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from helpers.sqlite import unsynced_sqlite
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from report.studies import IDENTITY, LAYERS, LOOKUP, RACED, make_study
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState
from skipsearch.errors import SearchError
from skipsearch.report import read_study
from skipsearch.report.report_page import render_report
from skipsearch.report.study_reader import read_studies
from skipsearch.tuning.storage import DEFAULT_STUDY_NAME
from skipsearch.tuning.study import StudyStore

__all__ = ["unsynced_sqlite"]


@pytest.fixture(params=["journal", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(tmp_path / "search.journal")
        if request.param == "journal"
        else f"sqlite:///{tmp_path / 'search.db'}"
    )


def test_it_holds_the_judged_masks_in_their_order_and_what_was_noted(storage: str) -> None:
    ledger = make_study(storage, failed=2)
    study = read_study(storage)
    assert [j.trial for j in study.judged] == [
        t for t in ledger.trials() if t.state is TrialState.COMPLETE
    ]
    assert study.n_left_out == 2
    assert study.searchers == ("sensitivity", "gp")
    assert study.n_layers == LAYERS
    assert study.identity["task"] == "sums"
    assert [r.split for r in study.race] == [r["split"] for r in RACED]
    assert study.best_so_far[-1] == study.best.speedup == max(j.speedup for j in study.judged)
    assert study.elapsed_s[-1] == pytest.approx(
        sum(j.trial.search_seconds or 0 for j in study.judged)
    )


def test_what_was_promised_of_the_winner_is_what_the_race_says_of_its_recipe(
    tmp_path: Path,
) -> None:
    make_study(tmp_path / "a.journal")
    study = read_study(tmp_path / "a.journal")
    assert study.confirmed is not None
    assert study.confirmed.predicted is None
    assert study.predicted_speedup(study.confirmed) == 1.31
    assert study.mask_of(study.confirmed) == SkipMask(LAYERS, (1, 2), (3,))


def test_a_winner_without_a_mask_has_none(tmp_path: Path) -> None:
    make_study(tmp_path / "a.journal", raced=[entry | {"recipe": [LOOKUP]} for entry in RACED])
    study = read_study(tmp_path / "a.journal")
    assert study.confirmed is not None
    assert study.mask_of(study.confirmed) is None
    assert study.predicted_speedup(study.confirmed) == 1.31


def test_reading_leaves_no_trace_and_fails_no_mask_that_is_being_judged(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipsearch.tuning.storage.HEARTBEAT_S", 3600)  # that one leaves a trace
    ledger = make_study(storage)
    ledger.claim(SkipMask(LAYERS, (1,)))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    assert read_study(storage).n_left_out == 1
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()
    } == before
    assert ledger.study.get_trials()[-1].state is optuna.trial.TrialState.RUNNING


def test_a_mask_that_two_workers_claimed_counts_once_and_a_data_base_may_hold_several_studies(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'searches.db'}"
    for name, count in (("one", 2), ("two", 3)):
        ledger = make_study(f"{url}#{name}", {"gp": count})
    assert ledger.claim(SkipMask(LAYERS, (1,))) is not None
    assert ledger.claim(SkipMask(LAYERS, (1,))) is None
    assert [
        (len(study.judged), study.n_left_out)
        for study in read_studies([f"{url}#one", f"{url}#two"])
    ] == [(2, 0), (3, 1)]


def test_one_of_several_searches_in_a_data_base_is_named_and_duplicates_do_not_count(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'search.db'}"
    ledger = make_study(f"{url}#second")
    assert ledger.claim(ledger.trials()[0].mask) is None
    assert read_study(f"{url}#second").n_left_out == 0
    with pytest.raises(SearchError, match="holds no search of this program"):
        read_study(url)


def test_half_a_line_of_a_process_that_is_writing_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    make_study(path)
    with path.open("ab") as journal:
        journal.write(b'{"op_code":4,"worker_id"')
    assert len(read_study(path).judged) == 17


def test_several_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    places = [
        tmp_path / "one" / "x.journal",
        tmp_path / "two" / "x.journal",
        tmp_path / "two" / "gp.journal",
    ]
    for place in places:
        make_study(place)
    assert [study.label for study in read_studies(places)] == [str(places[0]), str(places[1]), "gp"]
    with pytest.raises(SearchError, match=r"is named twice: give each once"):
        read_studies([places[0], places[0]])


# --- what is not a study


def nothing(path: Path) -> None:
    pass


def folder(path: Path) -> None:
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("model: demo\n")


def broken(path: Path) -> None:
    path.write_text('{"op_code":0, no json\n{"op_code":1}\n')


def nothing_judged(path: Path) -> None:
    make_study(path, {})


def all_failed(path: Path) -> None:
    make_study(path, {}, failed=3)


def lookup_alone(path: Path) -> None:
    make_study(path, {}, drafters="lookup")


def foreign(path: Path, name: str = "mine") -> None:
    optuna.create_study(storage=JournalStorage(JournalFileBackend(str(path))), study_name=name)


def nameless(path: Path) -> None:
    foreign(path, DEFAULT_STUDY_NAME)


def endless(path: Path) -> None:
    make_study(path, {"gp": 1}).study.set_user_attr("identity", {"n_layers": 10**9})


def other_race(path: Path) -> None:
    make_study(path, {"gp": 1}, raced=[{"mask": "0101"}])


def impossible_recipe(path: Path) -> None:
    make_study(
        path, {"gp": 1}, raced=[RACED[0] | {"recipe": [RACED[0]["recipe"][1] | {"attn": [LAYERS]}]}]
    )


def later_race(path: Path) -> None:
    make_study(
        path, {"gp": 1}, raced=[RACED[0] | {"recipe": [{"kind": "oracle", "draft_length": 1}]}]
    )


def senseless_race(path: Path) -> None:
    make_study(path, {"gp": 1}, raced=[RACED[0] | {"recipe": 7}])


def later_trial(path: Path) -> None:
    ledger = make_study(path, {})
    ledger.add(
        Trial(SkipMask(LAYERS, (1,)), 0.01, baseline_seconds_per_token=0.01),
        recipe=[{"kind": "oracle"}],
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nothing, "the file does not exist"),
        (folder, "that is a folder"),
        (empty, "is not the journal of a search"),
        (text, "is not the journal of a search"),
        (broken, "cannot be read"),
        (nothing_judged, "holds no judged mask (0 trials"),
        (all_failed, "holds no judged mask (3 trials"),
        (lookup_alone, "was for lookup alone, which has no masks to judge"),
        (foreign, "holds no search of this program"),
        (nameless, "does not say how many layers"),
        (endless, "does not say how many layers"),
        (other_race, "the race in"),
        (impossible_recipe, f"attn layer {LAYERS} is outside"),
        (later_race, "the recipe is not one that this version knows"),
        (senseless_race, "the recipe is not one that this version knows"),
        (later_trial, "trial 0 of"),
    ],
)
def test_what_is_no_study_of_ours_is_refused_in_one_sentence(
    make: Callable[[Path], Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.journal"
    make(path)
    with pytest.raises(SearchError) as raised:
        read_study(path)
    assert sentence in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("sqlite:///{}/none.db", "the file does not exist"),
        ("postgresql://me:secret@127.0.0.1:1/searches", "cannot be read"),
        ("nosuch://me:secret@host/x", "cannot be read"),
        ("sqlite:/://", "is not a storage address"),
        ("postgresql://127.0.0.1:1/searches?user=me&password=secret", "cannot be read"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_sentence_without_its_password(
    url: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(SearchError, match=sentence) as raised:
        read_study(url.format(tmp_path))
    assert "secret" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_data_base_without_a_study_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    file.write_bytes(b"")
    with pytest.raises(SearchError, match="cannot be read"):
        read_study(f"sqlite:///{file}")
    assert file.read_bytes() == b""


def test_a_search_without_masks_of_its_own_is_shown_by_its_race(tmp_path: Path) -> None:
    ledger = StudyStore(tmp_path / "x.journal", IDENTITY | {"drafters": "clasp"})
    ledger.set_attr("raced", RACED)
    study = read_study(tmp_path / "x.journal")
    assert study.best is None
    html, missing = render_report([study], None)
    assert "Predicted against measured" not in missing
    assert {"Convergence by searcher", "Layer map by searcher"} <= set(missing)
    assert "lookup: 2 tokens must match, copies up to 8" in html
