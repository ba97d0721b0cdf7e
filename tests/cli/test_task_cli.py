from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skipsearch.cli.task import app
from skipsearch.errors import TaskError
from skipsearch.tasks import data_folder, load_task

run = CliRunner()


def test_show_prints_three_prompts_sizes_and_hashes() -> None:
    result = run.invoke(app, ["show", "pycode"])
    task = load_task("pycode")
    assert result.exit_code == 0
    for prompt in task.calibration[:3]:
        assert prompt.id in result.stdout
        assert prompt.text in result.stdout
    for fact in ("calibration: 48", "holdout: 32", f"calibration_sha256: {task.calibration_sha256}"):
        assert fact in result.stdout


def test_show_as_json_is_one_object(tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "[bold]one[/]"}\n{"prompt": "two"}\n')
    [line] = run.invoke(app, ["show", str(data), "--json"]).stdout.splitlines()
    shown = json.loads(line)
    assert (shown["task"], shown["calibration"], shown["holdout"], len(shown["prompts"])) == ("p", 1, 1, 1)


def test_a_prompt_is_printed_as_it_is_and_not_as_markup(tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "[bold]one[/]"}\n{"prompt": "[bold]two[/]"}\n')
    assert "[bold]" in run.invoke(app, ["show", str(data)]).stdout


def test_every_task_that_comes_with_skipsearch_is_valid() -> None:
    result = run.invoke(app, ["validate", str(data_folder())])
    assert result.exit_code == 0
    assert "ok  pycode: 48 calibration and 32 hold-out prompts" in result.stdout


def test_validate_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "renamed").mkdir()
    manifest = (data_folder() / "pycode" / "task.yaml").read_text("utf-8")
    (tmp_path / "renamed" / "task.yaml").write_text(manifest, "utf-8")
    with pytest.raises(TaskError, match="name is pycode, its folder renamed"):
        run.invoke(app, ["validate", str(tmp_path / "renamed")], catch_exceptions=False)
    (tmp_path / "pycode").mkdir()
    (tmp_path / "pycode" / "task.yaml").write_text(manifest, "utf-8")
    with pytest.raises(TaskError, match="1 of 2 tasks"):
        run.invoke(app, ["validate", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"holds no task\.yaml, nor does a folder in it"):
        run.invoke(app, ["validate", str(tmp_path / "empty")], catch_exceptions=False)
