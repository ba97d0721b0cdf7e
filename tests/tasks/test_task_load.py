from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.errors import TaskError
from skipsearch.tasks import Prompt, data_folder, load_task, task_files, task_names
from skipsearch.tasks.manifest import HubSource, read_manifest
from skipsearch.tasks.prompt_template import fill_template, list_columns
from skipsearch.tasks.task import text_sha256

Folder = Callable[..., Path]
Write = Callable[..., Path]
DATA = (
    Path(__file__).parents[3] / "shared" / "data"
)  # samples of the published files, where a developer has them
PAPERS = {"cnndm", "xsum", "humaneval", "gsm8k", "mtbench", "wmt14_de_en", "nq", "rag", "specbench"}


def test_the_papers_tasks_and_four_of_our_own_come_with_skipsearch() -> None:
    assert set(task_names()) == {"chat", "extract", "pycode", "prose"} | PAPERS


@pytest.mark.parametrize("task", sorted(PAPERS))
def test_a_task_is_the_one_its_folder_names_and_ends_where_an_answer_loops(task: str) -> None:
    manifest = read_manifest(data_folder() / task / "task.yaml")
    assert (manifest.name, manifest.end_on_repeat) == (task, "loop")
    assert isinstance(manifest.source, HubSource)


@pytest.mark.parametrize(
    ("task", "shots", "sampling"),
    [
        ("cnndm", 1, (0.2, 0.85)),
        ("xsum", 1, (0.2, 0.85)),
        ("humaneval", 0, (0.6, 0.95)),
        ("gsm8k", 0, (0.0, 1.0)),
    ],
)  # greedy, as its appendix I reports accuracy
def test_draft_and_verifys_table_6(task: str, shots: int, sampling: tuple[float, float]) -> None:
    manifest = read_manifest(data_folder() / task / "task.yaml")
    assert (manifest.shots, manifest.max_new_tokens) == (shots, 512)
    assert (manifest.sampling.temperature, manifest.sampling.top_p, manifest.sampling.top_k) == (
        *sampling,
        0,
    )


@pytest.mark.parametrize("task", ["mtbench", "wmt14_de_en", "nq", "rag", "specbench"])
def test_clasps_spec_bench_is_greedy_up_to_512_tokens_of_a_request(task: str) -> None:
    manifest = read_manifest(data_folder() / task / "task.yaml")
    assert (
        manifest.shots,
        manifest.max_new_tokens,
        manifest.sampling.temperature,
        manifest.chat,
    ) == (0, 512, 0.0, True)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(TaskError, match="there is no task called 'pycod'; did you mean pycode"):
        load_task("pycod")


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"holds no task\.yaml"):
        load_task(tmp_path)


def test_without_the_data_folder_the_places_it_was_looked_for_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(
        "skipsearch.tasks.load.__file__", str(tmp_path / "skipsearch" / "tasks" / "load.py")
    )
    with pytest.raises(TaskError, match=r"neither in .*calibration_data nor in .*share"):
        task_names()
    (tmp_path / "share" / "skipsearch" / "calibration_data").mkdir(parents=True)
    assert data_folder() == tmp_path / "share" / "skipsearch" / "calibration_data"


def test_a_folder_is_a_task_and_its_paths_count_from_it(task_folder: Folder, jsonl: Write) -> None:
    jsonl([{"question": f"q{i}", "answer": "a"} for i in range(6)])
    task = load_task(task_folder())
    assert [len(task.calibration), len(task.holdout)] == [4, 2]
    assert all(
        prompt.text.startswith("Q: q") and prompt.text.endswith("\nA:")
        for prompt in task.calibration
    )
    assert load_task(task_folder() / "task.yaml") == task


def test_two_files_are_two_halves(task_folder: Folder, jsonl: Write) -> None:
    jsonl([{"question": f"q{i}"} for i in range(6)])
    jsonl([{"question": f"held {i}"} for i in range(3)], "held.jsonl")
    task = load_task(
        task_folder(source="{kind: jsonl, path: rows.jsonl, holdout_path: held.jsonl}")
    )
    assert all("held" in prompt.text for prompt in task.holdout)
    assert not any("held" in prompt.text for prompt in task.calibration)


@pytest.mark.parametrize(
    "outside",
    [
        "../rows.jsonl",
        "{tmp}/rows.jsonl",
        "link.jsonl",
        "linked/rows.jsonl",
        ".",
        '"rows\\0.jsonl"',
    ],
)
def test_a_manifest_names_no_file_outside_of_its_own_folder(
    task_folder: Folder, jsonl: Write, tmp_path: Path, outside: str
) -> None:
    rows, folder = jsonl([{"question": f"q{i}"} for i in range(6)]), tmp_path / "task"
    for key in ("path", "holdout_path"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "inside.jsonl").write_bytes(rows.read_bytes())
        (folder / "link.jsonl").symlink_to(rows)
        (folder / "linked").symlink_to(tmp_path)
        named = {"path": "inside.jsonl", key: outside.format(tmp=tmp_path)}
        task_folder(
            source="{kind: jsonl, " + ", ".join(f"{k}: {v}" for k, v in named.items()) + "}"
        )
        shutil.move(tmp_path / "task.yaml", folder / "task.yaml")
        with pytest.raises(
            TaskError, match="which is not in this folder; put it there, or name it with --data"
        ):
            load_task(folder)
        assert len(load_task(folder, data=rows).calibration) == 4, "the way out"


def test_a_manifests_file_may_stand_in_a_folder_below_and_the_task_behind_a_link(
    task_folder: Folder, jsonl: Write, tmp_path: Path
) -> None:
    (tmp_path / "below").mkdir()
    jsonl([{"question": f"q{i}"} for i in range(6)], "below/real.jsonl")
    (tmp_path / "below" / "rows.jsonl").symlink_to("real.jsonl")
    folder = task_folder(source="{kind: jsonl, path: below/rows.jsonl}")
    (tmp_path / "below" / "elsewhere").symlink_to(folder)
    assert len(load_task(tmp_path / "below" / "elsewhere").calibration) == 4


def test_the_files_that_a_task_is_read_from_are_known(task_folder: Folder, jsonl: Write) -> None:
    rows = jsonl([{"question": "q"}])
    folder = task_folder()
    assert task_files(folder) == (folder / "task.yaml", rows)
    assert task_files(folder, data="other.jsonl") == (folder / "task.yaml", Path("other.jsonl"))
    assert task_files(rows) == (rows,)
    assert task_files("pycode") == (data_folder() / "pycode" / "task.yaml",)


def test_local_data_replaces_a_tasks_source(jsonl: Write) -> None:
    task = load_task(
        "gsm8k", data=jsonl([{"question": f"How many {i}?", "answer": "3"} for i in range(100)])
    )
    assert (task.name, len(task.calibration), task.calibration[0].text[:18]) == (
        "gsm8k",
        64,
        "Question: How many",
    )
    assert task.notes == ("text from rows.jsonl instead of the task's own source",)
    with pytest.raises(TaskError, match="is data itself"):
        load_task("rows.jsonl", data="more.jsonl")


def test_spec_bench_lines_serve_the_task_of_their_category(jsonl: Write) -> None:
    rows = [
        {"question_id": i, "category": "rag" if i % 2 else "qa", "turns": [f"text {i}", "more"]}
        for i in range(20)
    ]
    task = load_task("rag", data=jsonl(rows))
    assert {int(prompt.id) % 2 for prompt in task.calibration + task.holdout} == {1}
    whole = load_task("nq", data=jsonl(rows))
    assert any("10 rows are complete prompts already" in note for note in whole.notes)
    assert whole.calibration[0].text.startswith("text ")
    with pytest.raises(
        TaskError,
        match=r"of a category that task wmt14_de_en takes \(translation\); there are qa, rag",
    ):
        load_task("wmt14_de_en", data=jsonl(rows))
    with pytest.raises(
        TaskError, match=r"no row is of a category that task humaneval takes \(none\)"
    ):
        load_task("humaneval", data=jsonl(rows))


@pytest.mark.skipif(
    not DATA.is_dir(), reason="no samples of the published files beside the repository"
)
@pytest.mark.parametrize(
    ("task", "file"),
    [
        ("humaneval", "humaneval"),
        ("gsm8k", "gsm8k_train200"),
        ("specbench", "spec_bench_even"),
        *(
            (part, "spec_bench_even")
            for part in ("cnndm", "gsm8k", "mtbench", "wmt14_de_en", "nq", "rag")
        ),
    ],
)
def test_the_papers_tasks_run_from_the_published_files(task: str, file: str) -> None:
    loaded = load_task(task, data=DATA / f"{file}.jsonl")
    assert min(len(loaded.calibration), len(loaded.holdout)) >= 20
    assert {p.text for p in loaded.calibration}.isdisjoint(p.text for p in loaded.holdout)


def test_the_hash_is_of_the_text_alone(jsonl: Write) -> None:
    task = load_task(jsonl([{"prompt": "a"}, {"prompt": "b"}]))
    renamed = dataclasses.replace(
        task, calibration=tuple(Prompt("other", p.text) for p in task.calibration)
    )
    assert renamed.calibration_sha256 == task.calibration_sha256
    assert text_sha256([Prompt("1", "ab")]) != text_sha256([Prompt("1", "a"), Prompt("2", "b")])
    assert text_sha256([Prompt("1", "a"), Prompt("2", "b")]) != text_sha256(
        [Prompt("1", "b"), Prompt("2", "a")]
    )


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]\w{0,5}", fullmatch=True), st.text(), min_size=1, max_size=4
    ),
    st.data(),
)
def test_a_rendered_template_is_str_format_of_its_columns(
    columns: dict[str, str], data: st.DataObject
) -> None:
    parts = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(["{{", "}}", "text ", "\n"]),
                st.sampled_from(sorted(columns)).map(lambda name: "{" + name + "}"),
            )
        )
    )
    template = "".join(parts)
    assert fill_template(template, columns) == template.format(**columns)
    assert set(list_columns(template)) <= set(columns)


@pytest.mark.parametrize(
    ("template", "columns", "expected"),
    [
        ("{a[de]}", {"a": {"de": "Satz"}}, "Satz"),
        ("{a[1]}", {"a": ["x", "y"]}, "y"),
        ("{n} + 1", {"n": 2}, "2 + 1"),
    ],
)
def test_placeholders_reach_into_a_column(
    template: str, columns: dict[str, object], expected: str
) -> None:
    assert fill_template(template, columns) == expected


@pytest.mark.parametrize(
    ("template", "columns", "rule"),
    [
        ("{a[fr]}", {"a": {"de": "Satz"}}, r"a\[fr\] is missing"),
        ("{a[2]}", {"a": ["x"]}, r"a\[2\] is missing"),
        ("{a}", {"a": ["x"]}, "a is a list"),
        ("{a}", {"a": True}, "a is a bool"),
        ("{a.b}", {"a": "x"}, "is not a placeholder"),
    ],
)
def test_a_placeholder_without_text_is_named(
    template: str, columns: dict[str, object], rule: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        fill_template(template, columns)


def test_a_file_of_another_name_is_told_what_names_there_are(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n")
    with pytest.raises(TaskError, match=r"prompts.txt is a file whose name does not end in .jsonl"):
        load_task(tmp_path / "prompts.txt")
    with pytest.raises(
        TaskError,
        match=r"not JSON .*; and prompts.txt does not end in .jsonl, .*: is it the right file\?",
    ):
        load_task("pycode", data=tmp_path / "prompts.txt")


def test_a_misspelt_file_has_the_nearest_name_suggested(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("one\n")
    with pytest.raises(
        TaskError,
        match=r"promts.jsonl: cannot be read \(No such file or directory\); did you mean "
        r".*/prompts.jsonl\?$",
    ):
        load_task(tmp_path / "promts.jsonl")
