"""`skipsearch export`: from a profile to a folder, or to one message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.profiles import write_demo_profile

from skipsearch.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Return the exit status."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["skipsearch", "export", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_help_starts_with_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    body = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert body[1] == "Example: skipsearch export --profile my-profile.yaml --out my-draft"


def test_it_writes_the_folder_and_says_what_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "draft"
    assert (
        run(
            monkeypatch,
            "--profile",
            write_demo_profile(tmp_path / "profile.yaml", mlp="[5, 6]"),
            "--out",
            out,
        )
        == 0
    )
    told = capsys.readouterr()
    assert told.out == f"{out}: {out}/README.md says how to run it\n"
    assert "never measured" in told.err
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("mlp", "more", "sentence"),
    [
        ("[5]", [], "skips the attention but not the MLP of layer 6"),
        ("[5, 6]", ["--model", "demmo"], "did you mean demo?"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    mlp: str,
    more: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_demo_profile(tmp_path / "profile.yaml", mlp=mlp)
    assert run(monkeypatch, "--profile", path, "--out", tmp_path / "draft", *more) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert told.err.startswith("error: ")
    assert len(told.err.splitlines()) == 1
    assert not (tmp_path / "draft").exists()
