"""Where a study lives: passwords stay out of sight, a data base is reached or one sentence says why
not, a journal has one writer.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers.postgresql import postgresql, server_url
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages.journal import JournalFileSymlinkLock

from skipsearch.errors import SearchError
from skipsearch.tuning.storage import (
    close_journal,
    discard_journal,
    is_journal,
    open_database,
    open_journal,
    redact_url,
    root_cause,
    split_study_url,
)
from skipsearch.tuning.study import StudyStore

__all__ = ["postgresql"]

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("where", "printed"),
    [
        ("postgresql://ann:hunter2@host/db", "postgresql://ann:***@host/db"),
        (
            "postgresql+psycopg://ann:hun@ter2@host:5432/db#llama",
            "postgresql+psycopg://ann:***@host:5432/db#llama",
        ),
        (
            "postgresql://host/db?user=ann&password=hunter2&sslmode=require",
            "postgresql://host/db?user=ann&password=***&sslmode=require",
        ),
        ("postgresql://:hunter2@host/db", "postgresql://:***@host/db"),
        ("postgresql://ann@host/db", "postgresql://ann@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        (
            "sqlite:///a/folder:with/signs@in.it/search.db",
            "sqlite:///a/folder:with/signs@in.it/search.db",
        ),
        ("folder/search.journal", "folder/search.journal"),
    ],
)
def test_a_place_is_printed_without_its_password(where: str, printed: str) -> None:
    assert redact_url(where) == printed


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8))
def test_no_password_is_printed_whatever_it_is_made_of(password: str) -> None:
    url = f"postgresql://ann:{password}@host/db#llama"
    assert password not in redact_url(url).replace("postgresql://ann:***@host/db#llama", "")
    assert password not in root_cause(ValueError(f"cannot parse {url}"), url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://ann@host/db", ("postgresql://ann@host/db", "skipsearch")),
        ("postgresql://ann@host/db#llama-2-13b", ("postgresql://ann@host/db", "llama-2-13b")),
        ("postgresql://ann:p#w@host/db", ("postgresql://ann:p#w@host/db", "skipsearch")),
        ("postgresql://ann:p#w@host/db#a.b_c", ("postgresql://ann:p#w@host/db", "a.b_c")),
        ("sqlite:///folder#1/search.db", ("sqlite:///folder#1/search.db", "skipsearch")),
    ],
)
def test_a_study_is_named_behind_the_address(url: str, expected: tuple[str, str]) -> None:
    assert split_study_url(url) == expected


# --- databases


def refusal(url: str) -> str:
    with pytest.raises(SearchError) as caught:
        open_database(url)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    assert re.search(
        r"ann:\*\*\*@127.0.0.1:9/db cannot be reached \(.*refused.*check the address",
        refusal(f"postgresql://ann:{SECRET}@127.0.0.1:9/db"),
    )


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{SECRET}@host:port/db",
        f"nosuch://ann:{SECRET}@host/db",
        "postgresql:// /?",
    ],
)
def test_an_address_that_makes_no_sense_is_one_sentence(url: str) -> None:
    assert "cannot be reached" in refusal(url)


def test_a_missing_driver_is_named_with_the_extra_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "pip install 'skipsearch[postgresql]'" in refusal(f"postgresql://ann:{SECRET}@host/db")


def test_a_wrong_password_is_one_sentence_and_not_repeated(postgresql: str) -> None:
    wrong = re.sub(r":[^:@]*@", f":{SECRET}@", postgresql)
    assert re.search(
        r"cannot be reached \(.*password authentication failed.*check the address, user and "
        r"password",
        refusal(wrong),
    )


def test_a_data_base_that_does_not_exist_is_one_sentence(postgresql: str) -> None:
    assert re.search("does not exist", refusal(postgresql + "x"))


def test_in_ci_a_missing_server_is_a_failure_and_not_a_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SKIPSEARCH_TEST_POSTGRES", raising=False)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="names no server"):
        server_url()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception):
        server_url()


# --- journals

HOLDER = """
import sys
from pathlib import Path
from skipsearch.tuning.storage import open_journal

open_journal(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_writes(journal: Path) -> Iterator[None]:
    """One that is killed in the end."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(journal)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        yield
        holder.kill()


def test_a_journal_has_one_process_at_a_time_until_that_ends_however_it_ends(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "search.journal"
    open_journal(journal)
    close_journal(journal)
    with another_process_writes(journal):
        for use in (open_journal, lambda path: StudyStore(path, {"n_layers": 2})):
            with pytest.raises(SearchError, match=r"in use by another process.*postgresql://"):
                use(journal)
    open_journal(journal)
    assert not is_journal(journal)
    close_journal(journal)


def test_a_process_may_open_its_own_journal_again(tmp_path: Path) -> None:
    for _ in range(2):
        open_journal(tmp_path / "search.journal")
    close_journal(tmp_path / "search.journal")
    close_journal(tmp_path / "search.journal")


@pytest.mark.parametrize("locks", [True, False], ids=["with-file-locks", "without"])
def test_a_lock_that_a_killed_process_left_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """Optuna's lock is a link beside the journal; by a relative path it leads nowhere and never
    grows old.

    On a file system without locks it is still used, and ends by itself when it is old.
    """

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr("fcntl.flock", unsupported)
        monkeypatch.setattr("time.monotonic", count(step=20).__next__)  # so it is old at once
        monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    journal, link, waited = Path("profiles", "search.journal"), os.symlink, 0
    StudyStore(journal, {"n_layers": 2}).close()
    JournalFileSymlinkLock(str(journal) if locks else os.path.abspath(journal)).acquire()

    def counted(*arguments: Any) -> None:
        nonlocal waited
        waited += 1
        assert waited < 50, "it would wait for ever"
        link(*arguments)

    monkeypatch.setattr(os, "symlink", counted)
    StudyStore(journal, {"n_layers": 2}, resume=True).close()


def test_an_interruption_at_any_moment_of_a_write_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna's lock made a missing file of one that came while the lock was taken away."""
    ledger = StudyStore(tmp_path / "search.journal", {"n_layers": 2})

    def interrupted(call: Any) -> Any:
        def then_interrupted(*arguments: Any, **options: Any) -> None:
            call(*arguments, **options)
            raise KeyboardInterrupt

        return then_interrupted

    for name in ("symlink", "rename", "unlink", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, interrupted(getattr(os, name)))
            with suppress(KeyboardInterrupt):
                ledger.set_attr("key", name)
    ledger.set_attr("key", "done")
    ledger.close()
    assert (
        StudyStore(tmp_path / "search.journal", {"n_layers": 2}, resume=True).study.user_attrs[
            "key"
        ]
        == "done"
    )


def test_a_journal_makes_room_for_another_unless_somebody_writes_it_or_it_is_none(
    tmp_path: Path,
) -> None:
    journal, notes = tmp_path / "search.journal", tmp_path / "notes.txt"
    StudyStore(journal, {"n_layers": 2}).close()
    assert is_journal(journal)
    with (
        another_process_writes(journal),
        pytest.raises(SearchError, match="in use by another process"),
    ):
        discard_journal(journal)
    assert is_journal(journal), "nothing was lost"
    discard_journal(journal)
    discard_journal(journal)
    assert not journal.exists()
    notes.write_text("mine")
    with pytest.raises(SearchError, match="is not the journal of a search"):
        discard_journal(notes)
    assert notes.read_text() == "mine"
