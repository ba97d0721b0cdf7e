"""The command line, run in this process: starting Python anew takes longer than most of what is
asked of it here.
"""

from __future__ import annotations

import sys

import pytest

from skipsearch.cli.main import main


def run_in_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """(exit status, stdout, stderr as one line) of a command."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["skipsearch", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, " ".join(captured.err.replace("│", " ").split())


def cmd(line: str, *values: object) -> list[str]:
    """Return the arguments of a command line, in which each `{}` is the next value, unsplit."""
    remaining = iter(values)
    arguments = [str(next(remaining)) if word == "{}" else word for word in line.split()]
    assert next(remaining, None) is None, "every value has its place"
    return arguments
