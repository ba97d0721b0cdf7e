"""`bench scores`: the answers of plain and drafted decoding are judged alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import run_in_process
from helpers.threads import one_thread

__all__ = ["one_thread"]
MODEL = ["--model", "demo", "--device", "cpu", "--engine", "lean", "--threads", "1"]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    rows = [
        {"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
        for n in range(6)
    ]
    return write_rows(tmp_path / "gsm8k.jsonl", rows)


def test_plain_and_drafted_answers_get_the_same_score(
    gsm8k: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--task", "gsm8k", "--data", str(gsm8k), "--systems", "plain,lookup+skip"]
    limits = ["--prompts", "2", "--samples", "1"]
    code, printed, shown = run_in_process(
        capsys, monkeypatch, "bench", "scores", *MODEL, *arguments, *limits, "--json"
    )
    assert code == 0, shown
    result = json.loads(printed)
    assert result["task"] == "gsm8k"
    greedy = [row for row in result["rows"] if row["sampling"] == "greedy"]
    assert [row["system"] for row in greedy] == ["plain", "lookup+skip"]
    assert greedy[0]["score"] == greedy[1]["score"]
    assert [row["identical"] for row in greedy] == [2, 2]
    code, printed, _ = run_in_process(
        capsys, monkeypatch, "bench", "scores", *MODEL, *arguments, *limits
    )
    assert code == 0
    assert "exact match" in printed
    assert "2 of 2" in printed
    assert "temperature 0.6, top_p 0.95" in printed


def test_programs_are_run_only_with_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {
            "prompt": f"def f{n}():\n    return {n}\n",  # complete: whatever follows, it passes
            "test": f"def check(f):\n    assert f() == {n}",
            "entry_point": f"f{n}",
        }
        for n in range(4)
    ]
    data = write_rows(tmp_path / "code.jsonl", rows)
    command = ["bench", "scores", *MODEL, "--task", "humaneval", "--data", str(data)]
    limits = ["--systems", "plain", "--prompts", "2", "--samples", "1"]
    code, _, shown = run_in_process(capsys, monkeypatch, *command, *limits)
    assert code == 1
    assert "add --run-generated-code to allow it" in shown
    code, printed, shown = run_in_process(
        capsys, monkeypatch, *command, *limits, "--run-generated-code", "--json"
    )
    assert code == 0, shown
    assert {row["metric"] for row in json.loads(printed)["rows"]} == {"pass@1"}
