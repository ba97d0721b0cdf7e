from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import HubSource, read_manifest

Folder = Callable[..., Path]


def refusal(folder: Path) -> str:
    with pytest.raises(TaskError) as caught:
        read_manifest(folder / "task.yaml")
    message = str(caught.value)
    assert message.startswith(str(folder / "task.yaml")), "the file comes first"
    assert "\n" not in message, "one sentence"
    return message.removeprefix(str(folder / "task.yaml"))


def test_a_manifest_is_read_with_its_types(task_folder: Folder) -> None:
    manifest = read_manifest(task_folder() / "task.yaml")
    assert (
        manifest.name,
        manifest.calibration,
        manifest.sampling.temperature,
        manifest.end_on_repeat,
    ) == ("small", 4, 0.0, 6)


def test_end_on_repeat_may_be_off(task_folder: Folder) -> None:
    assert read_manifest(task_folder(end_on_repeat="null") / "task.yaml").end_on_repeat is None


@pytest.mark.parametrize(
    ("field", "value", "line", "rule"),
    [
        ("name", "Not A Slug", 1, "name is 'Not A Slug'; it should match"),
        ("version", "0", 2, "version is 0; it should be greater than or equal to 1"),
        (
            "source",
            "{kind: stdlb, flavour: code}",
            4,
            "there is no source kind called 'stdlb'; did you mean stdlib?",
        ),
        ("source", "{path: rows.jsonl}", 4, "source has no kind"),
        ("source", "{kind: stdlib, flavour: poems}", 4, "source.flavour is 'poems'"),
        ("template", "'{question!r}'", 5, "{question!r} is not a placeholder"),
        ("template", "'{question.__class__}'", 5, "{question.__class__} is not a placeholder"),
        ("template", "'{question'", 5, "template: "),
        ("max_new_tokens", "'128'", 6, "max_new_tokens is '128'; it should be a valid integer"),
        ("max_new_tokens", "true", 6, "max_new_tokens is True"),
        ("sampling", "{temperature: -1.0}", 8, "sampling.temperature is -1.0"),
        (
            "sampling",
            "{temperature: .nan}",
            8,
            "sampling.temperature: `.nan` stands here; write null, true, false, a finite number",
        ),
        (
            "sampling",
            "{temprature: 0.0}",
            8,
            "there is no field called 'temprature'; did you mean temperature?",
        ),
        ("calibration", "0", 9, "calibration is 0"),
    ],
)
def test_an_error_names_line_field_and_rule(
    task_folder: Folder, field: str, value: str, line: int, rule: str
) -> None:
    message = refusal(task_folder(**{field: value}))
    assert message.startswith(f", line {line}"), message
    assert rule in message


def test_an_unknown_field_is_answered_with_the_nearest(task_folder: Folder) -> None:
    assert "did you mean holdout?" in refusal(task_folder("hold_out: 3\n"))


def test_a_missing_field_is_named(task_folder: Folder) -> None:
    folder = task_folder()
    path = folder / "task.yaml"
    path.write_text(path.read_text().replace("end_on_repeat: 6\n", ""))
    assert refusal(folder) == ": end_on_repeat is missing"


def test_shots_need_the_shape_of_one(task_folder: Folder) -> None:
    assert "shots and shot belong together" in refusal(task_folder("shots: 1\n"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("name: a\nname: b\n", ", line 2, name: this key is written twice; keep one"),
        ("name: &x a\ndescription: *x\n", ", line 1, name: anchors (`&x`) are not allowed"),
        ("name: [\n", ", line 2: this is not YAML"),
        ("- name\n", ": a task manifest is a mapping"),
        ("", ": the file is empty; a task manifest is a map that starts with name"),
        (
            "name: !!python/object/apply:os.system [ls]\n",
            ", line 1, name: tags (`tag:yaml.org,2002:python/object/apply:os",
        ),
        ("? [a, b]\n: 1\n", ", line 1: a key must be a word"),
        (
            "a: " + "[" * 3000,
            "values are nested deeper than 8 levels, which no task manifest needs",
        ),
        ("# " + "x" * 140_000, ": the file is larger than 128 KiB, which no task manifest needs"),
    ],
)
def test_yaml_that_hides_something_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "task.yaml").write_text(text)
    assert rule in refusal(tmp_path)


def test_a_file_that_is_not_utf8_or_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "task.yaml").write_bytes(b"name: caf\xe9\n")
    assert "line 1: byte 9 is not UTF-8" in refusal(tmp_path)


def test_a_hub_source_is_pinned_to_files_that_do_not_overlap(task_folder: Folder) -> None:
    hub = (
        "{kind: hub, repo: org/set, revision: abc, "
        "calibration_files: [a.parquet], holdout_files: [%s]}"
    )
    assert isinstance(
        read_manifest(task_folder(source=hub % "b.jsonl") / "task.yaml").source, HubSource
    )
    assert "a.parquet is in both splits" in refusal(task_folder(source=hub % "a.parquet"))
    assert "b.zip is neither .parquet nor .jsonl" in refusal(task_folder(source=hub % "b.zip"))
    nameless = "{kind: hub, repo: set, revision: a, calibration_files: [a.jsonl]}"
    assert "source.repo is 'set'" in refusal(task_folder(source=nameless))
