"""The study: a killed search resumes without the loss of a finished trial.

A study never mixes two searches.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.full_disk import limit_file_size
from helpers.postgresql import postgresql
from helpers.sqlite import unsynced_sqlite
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial, TrialState
from skipsearch.drafters.exits.adaptive import Adaptive
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.errors import SearchError
from skipsearch.tuning.storage import close_journal
from skipsearch.tuning.study import StudyStore
from skipsearch.tuning.trial_records import parameter_names

__all__ = ["postgresql", "unsynced_sqlite"]

LAYERS = 3
IDENTITY: dict[str, Any] = {
    "model": "tiny",
    "n_layers": LAYERS,
    "config_sha256": "c" * 64,
    "weights_sha256": "w" * 64,
    "dtype": "float32",
    "device": "a processor, 1 threads",
    "engine": "hf",
    "task": "sums",
    "calibration_sha256": "d" * 64,
    "objective": "replay",
    "whole_layers": False,
    "software": {"torch": "2", "cuda": None},
}
RECIPE = Recipe(
    (
        Lookup(min_match=2, draft_length=6, per_match=2),
        Skip.from_mask(SkipMask(LAYERS, (1,)), 8, Adaptive(threshold=0.4, across_requests=True)),
    )
)
FULL = Trial(
    SkipMask(LAYERS, (0, 2), (1,)),
    0.0042,
    0.0001,
    "replay",
    0.9,
    2.5,
    0.4,
    baseline_seconds_per_token=0.005,
    recipe=RECIPE,
)
BARE = Trial(SkipMask(LAYERS, (1,)), 0.0061)
FAILED = Trial(SkipMask(LAYERS, (), (2,)), math.inf, state=TrialState.FAILED)

times = st.floats(1e-6, 10)
shares = st.none() | st.floats(0, 1)
masks = st.lists(st.integers(0, 1), min_size=2 * LAYERS, max_size=2 * LAYERS).map(
    SkipMask.from_bits
)
finished = st.builds(
    Trial,
    masks,
    times,
    times,
    st.sampled_from(["replay", "wall"]),
    shares,
    shares,
    shares,
    baseline_seconds_per_token=st.none() | times,
    recipe=st.none() | st.just(RECIPE),
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "search.journal"


@pytest.fixture(params=["journal", "sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "journal":
        return str(tmp_path / "search.journal")
    return (
        f"sqlite:///{tmp_path / 'search.db'}"
        if request.param == "sqlite"
        else request.getfixturevalue("postgresql")
    )


def claimed(ledger: StudyStore, mask: SkipMask) -> int:
    number = ledger.claim(mask)
    assert number is not None
    return number


# --- round trip


def test_trials_are_read_back_as_they_were_judged_from_a_journal_and_from_a_data_base(
    storage: str,
) -> None:
    ledger = StudyStore(storage, IDENTITY)
    ledger.add(FULL)
    ledger.finish(claimed(ledger, BARE.mask), BARE)
    ledger.add(FAILED)
    assert ledger.trials() == [FULL, BARE, FAILED]
    assert StudyStore(storage, IDENTITY, resume=True).trials() == [FULL, BARE, FAILED]


@given(st.lists(finished, min_size=1, max_size=4))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_trial_survives_the_journal(tmp_path: Path, trials: list[Trial]) -> None:
    where = tmp_path / "any.journal"
    where.unlink(missing_ok=True)
    ledger = StudyStore(where, IDENTITY)
    for trial in trials:
        ledger.add(trial)
    assert StudyStore(where, IDENTITY, resume=True).trials() == trials


def test_a_claimed_trial_is_none_until_it_is_finished(journal: Path) -> None:
    ledger = StudyStore(journal, IDENTITY)
    number = claimed(ledger, BARE.mask)
    assert ledger.trials() == []
    ledger.finish(number, BARE)
    assert ledger.trials() == [BARE]


def test_a_time_that_is_no_number_is_a_failure_and_not_the_best_trial(journal: Path) -> None:
    ledger = StudyStore(journal, IDENTITY)
    ledger.add(Trial(BARE.mask, math.nan))
    ledger.finish(claimed(ledger, FAILED.mask), Trial(FAILED.mask, math.inf))
    assert [t.state for t in ledger.trials()] == [TrialState.FAILED] * 2
    assert [t.seconds_per_token for t in ledger.trials()] == [math.inf] * 2


def test_a_mask_is_stored_a_named_bit_a_sub_layer_so_that_dashboards_can_show_it(
    journal: Path,
) -> None:
    ledger = StudyStore(journal, IDENTITY)
    ledger.add(FULL)
    assert parameter_names(2) == ["attn_000", "mlp_000", "attn_001", "mlp_001"]
    assert ledger.study.trials[0].params == {
        "attn_000": 1,
        "mlp_000": 0,
        "attn_001": 0,
        "mlp_001": 1,
        "attn_002": 1,
        "mlp_002": 0,
    }
    assert ledger.study.best_value == FULL.seconds_per_token


# --- what may be resumed


def test_a_journal_is_never_written_over_by_accident(journal: Path) -> None:
    StudyStore(journal, IDENTITY).add(FULL)
    with pytest.raises(SearchError, match=r"already holds a search.*--resume"):
        StudyStore(journal, IDENTITY)
    assert StudyStore(journal, IDENTITY, resume=True).trials() == [FULL]


def test_resuming_what_does_not_exist_is_refused_and_creates_nothing(storage: str) -> None:
    with pytest.raises(
        SearchError, match=r"--resume was given and .* holds no search yet"
    ) as caught:
        StudyStore(storage, IDENTITY, resume=True)
    assert ":***@" in str(caught.value) or "postgresql" not in storage
    if "://" not in storage:
        assert not Path(storage).exists()
    assert StudyStore(storage, IDENTITY).trials() == []


@pytest.mark.parametrize("key", [k for k in IDENTITY if k != "n_layers"])
def test_a_search_of_something_else_is_refused_by_naming_what_differs(
    journal: Path, key: str
) -> None:
    StudyStore(journal, IDENTITY)
    with pytest.raises(SearchError, match=f"{key} = .*now another"):
        StudyStore(journal, {**IDENTITY, key: "another"}, resume=True)


def test_all_that_differs_is_named_in_one_sentence(journal: Path) -> None:
    StudyStore(journal, IDENTITY)
    with pytest.raises(SearchError) as caught:
        StudyStore(journal, {**IDENTITY, "dtype": "bfloat16", "task": "prose"}, resume=True)
    sentence = str(caught.value)
    assert "dtype = float32 (now bfloat16)" in sentence
    assert "task = sums (now prose)" in sentence
    assert "engine" not in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "content",
    [
        b"schema_version: 1\n",
        b'{"prompt": "two"}\n{"prompt": "lines"}\n',
        b"no newline at its end",
        b"\x00\xff\x00\xff\n",
        b'{"half": ',
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(
    journal: Path, content: bytes
) -> None:
    journal.write_bytes(content)
    for resume in (True, False):
        with pytest.raises(SearchError, match="is not the journal of a search"):
            StudyStore(journal, IDENTITY, resume)
        assert journal.read_bytes() == content


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in (tmp_path / "file" / "search.journal", tmp_path):
        with pytest.raises(SearchError, match="cannot be opened") as caught:
            StudyStore(where, IDENTITY)
        assert "\n" not in str(caught.value)


def test_a_data_base_that_cannot_be_reached_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="cannot be reached"):
        StudyStore(f"sqlite:///{tmp_path}/no/such/folder/search.db", IDENTITY)


def test_a_full_disk_ends_the_search_with_a_sentence_and_keeps_what_was_written(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = StudyStore(journal, IDENTITY)
    ledger.add(FULL)
    number = claimed(ledger, BARE.mask)
    with monkeypatch.context() as patched:
        patched.setattr("optuna.storages.journal.JournalFileBackend.append_logs", full)
        for write in (
            lambda: ledger.add(BARE),
            lambda: ledger.finish(number, BARE),
            lambda: ledger.claim(BARE.mask),
        ):
            with pytest.raises(SearchError, match="No space left on device"):
                write()
    assert [
        t
        for t in StudyStore(journal, IDENTITY, resume=True).trials()
        if t.state is TrialState.COMPLETE
    ] == [FULL]


# --- killed


def test_a_line_that_was_torn_by_a_kill_is_cut_off_and_writing_goes_on_behind_it(
    journal: Path,
) -> None:
    StudyStore(journal, IDENTITY).add(FULL)
    whole = journal.read_bytes()
    StudyStore(journal, IDENTITY, resume=True).add(BARE)
    torn = journal.read_bytes()[:-20]
    assert len(torn) > len(whole)
    journal.write_bytes(torn)
    resumed = StudyStore(journal, IDENTITY, resume=True)
    assert resumed.trials() == [FULL]
    resumed.add(FAILED)
    assert StudyStore(journal, IDENTITY, resume=True).trials() == [FULL, FAILED]


def test_wherever_the_journal_is_torn_it_can_be_resumed_with_every_whole_trial(
    journal: Path,
) -> None:
    ledger = StudyStore(journal, IDENTITY)
    written: list[tuple[int, Trial]] = []
    for trial in (FULL, BARE):
        ledger.finish(claimed(ledger, trial.mask), trial)
        written.append((journal.stat().st_size, trial))
    data = journal.read_bytes()
    for size in range(3, len(data), 331):
        journal.write_bytes(data[:size])
        resumed = StudyStore(journal, IDENTITY, resume=True)
        complete = [t for t in resumed.trials() if t.state is TrialState.COMPLETE]
        assert complete == [trial for end, trial in written if end <= size]
        resumed.finish(claimed(resumed, FAILED.mask), Trial(FAILED.mask, 1.0))
        assert resumed.trials()[-1].mask == FAILED.mask, (
            "a waiting trial of the killed process must not be taken for a new one"
        )


def test_a_last_line_torn_anywhere_costs_at_most_that_line_and_is_told(journal: Path) -> None:
    ledger = StudyStore(journal, IDENTITY)
    ledger.add(FULL)
    before = journal.stat().st_size
    ledger.add(BARE)
    ledger.close()
    data = journal.read_bytes()
    assert data[before:].count(b"\n") == 1
    for size in (*range(before, len(data), 23), before + 1, len(data) - 1, len(data)):
        journal.write_bytes(data[:size])
        resumed = StudyStore(journal, IDENTITY, resume=True)
        assert resumed.truncated == (before < size < len(data))
        assert resumed.trials() == ([FULL, BARE] if size == len(data) else [FULL])
        resumed.close()
        assert journal.read_bytes().startswith(
            data[: size if size == len(data) else before] + b'{"op_code":'
        )


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_disk_that_is_full_within_a_line_keeps_what_is_before_it_and_after_space_is_freed(
    journal: Path, room: int
) -> None:
    ledger = StudyStore(journal, IDENTITY)
    ledger.add(FULL)
    data = journal.read_bytes()
    number = claimed(ledger, FAILED.mask)
    claim = journal.read_bytes()
    for write in (
        lambda: ledger.add(BARE),
        lambda: ledger.finish(number, BARE),
        lambda: ledger.claim(BARE.mask),
        lambda: ledger.set_attr("raced", []),
    ):
        with limit_file_size(len(claim) + room), pytest.raises(SearchError) as caught:
            write()
        assert str(caught.value) == (
            f"the study {journal} cannot be written ([Errno 27] File too large): the trials in it "
            "are kept; make "
            "room, then go on with --resume"
        )
        assert journal.read_bytes() == claim, (
            "no half of a line is left for the next one to be glued to"
        )
    ledger.add(BARE)
    assert [t for t in ledger.trials() if t.state is TrialState.COMPLETE] == [FULL, BARE]
    ledger.close()
    resumed = StudyStore(journal, IDENTITY, resume=True)
    assert [t for t in resumed.trials() if t.state is TrialState.COMPLETE] == [FULL, BARE]
    assert not resumed.truncated
    assert journal.read_bytes().startswith(data)


def test_a_disk_that_is_full_when_the_search_begins_is_one_sentence_and_the_search_can_begin_later(
    journal: Path,
) -> None:
    with (
        limit_file_size(10),
        pytest.raises(
            SearchError, match=r"cannot be opened \(.*File too large\).*with room on the disk"
        ),
    ):
        StudyStore(journal, IDENTITY)
    close_journal(journal)
    assert StudyStore(journal, IDENTITY, resume=journal.stat().st_size > 0).trials() == []


KILLED = """
import sys
from tuning.test_study import BARE, FULL, IDENTITY
from skipsearch.tuning.study import StudyStore

ledger = StudyStore(sys.argv[1], IDENTITY)
ledger.add(FULL)
ledger.finish(ledger.claim(BARE.mask), BARE)
ledger.claim(FULL.mask.flip(1))
print("measuring", flush=True)
sys.stdin.read()
"""


def test_a_trial_that_kill_9_left_running_is_failed_on_resume_and_no_finished_one_is_lost(
    journal: Path,
) -> None:
    storage = str(journal)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *map(os.path.abspath, sys.path)])
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, storage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "measuring\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    resumed = StudyStore(storage, IDENTITY, resume=True)
    left = Trial(FULL.mask.flip(1), math.inf, state=TrialState.FAILED)
    assert resumed.trials() == [FULL, BARE, left]
    again = Trial(left.mask, 0.5)
    resumed.finish(claimed(resumed, again.mask), again)
    assert resumed.trials() == [FULL, BARE, left, again]
