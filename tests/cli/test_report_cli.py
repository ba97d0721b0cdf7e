"""`skipsearch report`: from studies and a profile to a page, or to one message."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.command import cmd, run_in_process
from helpers.profiles import GOLDEN

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.skip.spec import Skip
from skipsearch.tuning.study import StudyStore

PROFILE = GOLDEN / "v3_speculate.yaml"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    ledger = StudyStore(
        tmp_path / "search.journal", {"model": "demo", "n_layers": 16, "task": "pycode"}
    )
    ledger.add(
        Trial(
            SkipMask(16, (3,)),
            0.004,
            0.0001,
            "replay",
            0.9,
            2.0,
            0.9,
            baseline_seconds_per_token=0.005,
            recipe=Recipe((Skip(attn=(3,), mlp=(), draft_length=2, exit=Fixed()),)),
            searcher="gp",
            search_seconds=0.1,
        )
    )
    return tmp_path / "search.journal"


def run(capsys: Any, monkeypatch: Any, *arguments: object) -> tuple[int, str, str]:
    return run_in_process(capsys, monkeypatch, "report", *arguments)


def test_help_starts_with_an_example(capsys: Any, monkeypatch: Any) -> None:
    status, out, _ = run(capsys, monkeypatch, "--help")
    assert status == 0
    body = [line.strip() for line in out.splitlines() if line.strip()]
    assert body[1] == "Example: skipsearch report my-profile.yaml"


def test_a_study_becomes_a_page_and_what_it_lacks_is_said(
    journal: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    out = tmp_path / "new" / "report.html"
    status, told, err = run(capsys, monkeypatch, "--study", journal, "--out", out)
    assert (status, told) == (0, f"{out}: open it in a browser\n")
    assert err == (
        "not drawn, and the page says why: Predicted against measured, Time a "
        "token, What each drafter contributed, "
        "How often drafts are right"
    )
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 3


def test_a_profile_alone_becomes_a_page(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    assert run(capsys, monkeypatch, PROFILE, "--out", tmp_path / "report.html")[0] == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "1.337× (1.310–1.366)" in page


def test_a_profile_is_drawn_with_the_journal_next_to_it_as_a_page_next_to_it(
    journal: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    profile = tmp_path / "search.yaml"
    profile.write_bytes(PROFILE.read_bytes())
    assert run(capsys, monkeypatch, profile)[0] == 0
    page = tmp_path / "search.html"
    together = page.read_bytes()
    assert run(capsys, monkeypatch, "--study", journal, "--force")[0] == 0
    study_alone = page.read_bytes()
    assert run(capsys, monkeypatch, profile, "--study", journal, "--force")[0] == 0
    assert page.read_bytes() == together != study_alone


def test_studies_and_a_profile_are_drawn_together_and_again_only_with_force(
    journal: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    other = tmp_path / "other.journal"
    other.write_bytes(journal.read_bytes())
    out = tmp_path / "report.html"
    arguments = cmd("{} --study {} --study {} --out {}", PROFILE, journal, other, out)
    assert run(capsys, monkeypatch, *arguments)[0] == 0
    first = out.read_bytes()
    status, told, err = run(capsys, monkeypatch, *arguments)
    assert (status, told) == (1, "")
    assert "exists already: replace it with --force, or write another with --out" in err
    assert run(capsys, monkeypatch, *arguments, "--force")[0] == 0
    assert out.read_bytes() == first, "the same data make the same page"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_leaves_the_page_that_was_there(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "report.html"
    out.write_text("the old page")
    monkeypatch.setattr(os, "fsync", full)
    status, told, err = run(capsys, monkeypatch, PROFILE, "--out", out, "--force")
    assert (status, told) == (1, "")
    assert (
        err == f"error: cannot write {out}: No space left on device; make room there, or choose "
        "another place"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert out.read_text() == "the old page"


def test_neither_a_study_nor_a_profile_is_a_wrong_call(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    status, _, err = run(capsys, monkeypatch, "--out", tmp_path / "report.html")
    assert status == 2
    assert "name a profile, or a search with --study" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--study", "{tmp}/none.journal"],
            "there is no study at {tmp}/none.journal: the file does not exist",
        ),
        (["--study", str(PROFILE)], "is not the journal of a search"),
        (["--study", "{journal}", "--study", "{journal}"], "is named twice"),
        (["{tmp}/none.yaml"], "none.yaml"),
        (["{journal}"], "search.journal"),
        (["--study", "{journal}", "--out", "{tmp}"], "is a folder; name the file to write"),
        (
            ["--study", "{journal}", "--out", "{journal}", "--force"],
            "search.journal is the file of --study, which would be lost",
        ),
        (
            ["--study", "{journal}", "--out", "{journal}/report.html"],
            "search.journal cannot be made (",
        ),
        (["--study", "{journal}", "--out", "{tmp}/" + "x" * 300 + ".html"], "ile name too long"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    arguments: list[str],
    sentence: str,
    journal: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
) -> None:
    given = [a.format(tmp=tmp_path, journal=journal) for a in arguments]
    before = journal.read_bytes()
    status, told, err = run(
        capsys,
        monkeypatch,
        *given,
        *([] if "--out" in given else ["--out", tmp_path / "report.html"]),
    )
    assert (status, told) == (1, "")
    assert sentence.format(tmp=tmp_path, journal=journal) in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["search.journal"]
    assert journal.read_bytes() == before


def test_a_folder_that_may_not_be_written_to_is_found_out_before_the_work(
    journal: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as root one may write anywhere
    status, _, err = run(capsys, monkeypatch, "--study", journal, "--out", tmp_path / "report.html")
    assert (status, err) == (
        1,
        f"error: the folder {tmp_path} may not be written to: choose another with --out",
    )
