from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import cmd
from helpers.letter_tokenizer import CHAT_TEMPLATE, letter_tokenizer
from typer.testing import CliRunner

from skipsearch.cli.task import app
from skipsearch.errors import ModelError, TaskError
from skipsearch.replay.workload import template_sha256
from skipsearch.tasks import data_folder, load_task

run = CliRunner()


def test_show_prints_three_prompts_sizes_and_hashes() -> None:
    result = run.invoke(app, ["show", "pycode"])
    task = load_task("pycode")
    assert result.exit_code == 0
    for prompt in task.calibration[:3]:
        assert prompt.id in result.stdout
        assert prompt.text in result.stdout
    for fact in (
        "calibration: 96",
        "holdout: 32",
        f"calibration_sha256: {task.calibration_sha256}",
    ):
        assert fact in result.stdout


def test_show_as_json_is_one_object(tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "[bold]one[/]"}\n{"prompt": "two"}\n')
    [line] = run.invoke(app, ["show", str(data), "--json"]).stdout.splitlines()
    shown = json.loads(line)
    assert (shown["task"], shown["calibration"], shown["holdout"], len(shown["prompts"])) == (
        "p",
        1,
        1,
        1,
    )


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tokenizer and config of a chat model with a context of 40 tokens.

    `task show` needs no weights.
    """
    folder = tmp_path_factory.mktemp("models") / "chatty"
    letter_tokenizer(CHAT_TEMPLATE).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 40})
    )
    return folder


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Write a task of three requests, one of which is too long for `chat_model`."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"id": n, "prompt": n * "ab"}) + "\n" for n in (1, 2, 20))
    )
    (tmp_path / "task.yaml").write_text(
        "name: requests\nversion: 1\ndescription: of a model\nsource: {kind: jsonl, path: "
        'rows.jsonl}\ntemplate: "{prompt}"\nchat: true\n'
        "max_new_tokens: 100\nmax_prompt_tokens: 100\nsampling: {}\ncalibration: 2\nholdout: "
        "1\nseed: 0\nend_on_repeat: 6\n"
    )
    return tmp_path


def test_show_with_a_model_counts_its_tokens_and_shows_its_chat_template(
    chat_model: Path, requests: Path
) -> None:
    [line] = run.invoke(
        app, ["show", str(requests), "--model", str(chat_model), "--json"]
    ).stdout.splitlines()
    shown = json.loads(line)
    around = len("<s>user:\nai:") - len("<s>") + 1  # <s> is one token, every letter another
    assert shown["tokens"] == {"min": around + 2, "median": around + 4, "max": around + 40}
    assert (shown["max_prompt_tokens"], shown["max_new_tokens"], shown["too_long"]) == (20, 20, 1)
    assert shown["chat_template_sha256"] == template_sha256(
        load_task(requests), letter_tokenizer(CHAT_TEMPLATE)
    )
    for prompt in shown["prompts"]:
        assert prompt["text"] == f"<s>user:{int(prompt['id']) * 'ab'}\nai:"
        assert prompt["tokens"] == around + 2 * int(prompt["id"])
    for_people = run.invoke(app, ["show", str(requests), "--model", str(chat_model)]).stdout
    assert f"tokens: min {around + 2}, median {around + 4}, max {around + 40}" in for_people


def test_prompts_of_a_file_are_shown_in_the_template_if_asked(
    chat_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    texts = []
    for options in ([], ["--chat"]):
        [line] = run.invoke(
            app, ["show", str(data), "--model", str(chat_model), "--json", *options]
        ).stdout.splitlines()
        texts.append(json.loads(line)["prompts"][0]["text"])
    assert texts[1] == f"<s>user:{texts[0]}\nai:"


def test_a_base_model_gets_requests_as_they_are(requests: Path) -> None:
    [line] = run.invoke(app, cmd("show {} --model demo --json", str(requests))).stdout.splitlines()
    shown = json.loads(line)
    assert shown["chat_template_sha256"] is None
    assert [prompt["text"] for prompt in shown["prompts"]] == [
        int(prompt["id"]) * "ab" for prompt in shown["prompts"]
    ]


def test_show_without_a_tokenizer_is_one_sentence(requests: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match="has no tokenizer, so nothing says how it reads text: put its tokenizer files beside "
        "its weights",
    ):
        run.invoke(app, ["show", str(requests), "--model", str(tmp_path)], catch_exceptions=False)


def test_a_prompt_is_printed_as_it_is_and_not_as_markup(tmp_path: Path) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "[bold]one[/]"}\n{"prompt": "[bold]two[/]"}\n')
    assert "[bold]" in run.invoke(app, ["show", str(data)]).stdout


@pytest.mark.thorough
def test_every_task_that_comes_with_skipsearch_is_valid() -> None:
    result = run.invoke(app, ["validate", str(data_folder())])
    assert result.exit_code == 0
    assert "ok  pycode: 96 calibration and 32 hold-out prompts" in result.stdout


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
