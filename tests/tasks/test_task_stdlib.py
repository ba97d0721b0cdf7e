from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers.marks import thorough

from skipsearch.errors import TaskError
from skipsearch.tasks import Task, load_task, manifest_path
from skipsearch.tasks.manifest import Manifest, StdlibSource, read_manifest
from skipsearch.tasks.sources import stdlib
from skipsearch.tasks.sources.python_prompts import (
    MAX_CODE_CHARS,
    MIN_CODE_CHARS,
    iter_code_prompts,
    iter_docstring_prompts,
)


@cache
def loaded(task: str) -> Task:
    return load_task(task)


@pytest.fixture(params=["pycode", *thorough("prose")])
def task(request: pytest.FixtureRequest) -> Task:
    return loaded(request.param)


def module_of(prompt_id: str) -> str:
    return prompt_id.partition(":")[0]


def test_the_halves_are_as_large_as_asked_for(task: Task) -> None:
    assert (len(task.calibration), len(task.holdout), task.notes) == (96, 32, ())


def test_no_package_and_no_text_stands_in_both_halves(task: Task) -> None:
    packages = [
        {module_of(p.id).partition(".")[0] for p in half}
        for half in (task.calibration, task.holdout)
    ]
    assert packages[0].isdisjoint(packages[1])
    assert {p.text for p in task.calibration}.isdisjoint(p.text for p in task.holdout)


def test_prompts_of_either_half_share_few_lines() -> None:
    task = loaded("pycode")
    searched = {
        line
        for p in task.calibration
        for line in p.text.split("\n")
        if len(line.strip()) >= stdlib.LONG_LINE_CHARS
    }
    for prompt in task.holdout:
        lines = {
            line for line in prompt.text.split("\n") if len(line.strip()) >= stdlib.LONG_LINE_CHARS
        }
        assert len(lines & searched) <= stdlib.MAX_REPEATED_FRACTION * len(lines), prompt.id


def test_ids_and_texts_are_unique_and_nothing_is_empty(task: Task) -> None:
    both = task.calibration + task.holdout
    assert len({p.id for p in both}) == len({p.text for p in both}) == len(both)
    assert all(len(p.text) > 300 and p.text == p.text.rstrip() for p in both)


def test_no_module_gives_more_prompts_than_the_manifest_allows(task: Task) -> None:
    modules = [module_of(p.id) for p in task.calibration + task.holdout]
    assert max(map(modules.count, modules)) <= {"pycode": 1, "prose": 2}[task.name]


def test_excluded_text_stays_out(task: Task) -> None:
    for prompt in task.calibration + task.holdout:
        module = module_of(prompt.id)
        assert not stdlib.EXCLUDED_FOLDERS & set(module.split("."))
        assert not any(f"{module}.".startswith(f"{other}.") for other in stdlib.PUBLISHED_TWICE)


def test_another_process_reads_the_same_text() -> None:
    """Hash randomisation and the order of a folder's listing must not matter."""
    code = (
        "from skipsearch.tasks import load_task; t = load_task('pycode'); "
        "print(t.calibration_sha256, t.holdout_sha256)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    here = loaded("pycode")
    assert out == [here.calibration_sha256, here.holdout_sha256]


def test_another_seed_gives_other_prompts_but_moves_no_package_across() -> None:
    task = loaded("pycode")
    other = stdlib.read_stdlib(
        StdlibSource(kind="stdlib", flavour="code"), manifest("pycode", seed=1)
    )
    assert [row.id for row in other.calibration] != [p.id for p in task.calibration]
    held = {module_of(p.id).partition(".")[0] for p in task.holdout}
    assert held.isdisjoint(module_of(row.id).partition(".")[0] for row in other.calibration)


def test_a_code_prompt_is_real_source_that_ends_inside_a_function() -> None:
    modules = stdlib.find_modules(Path(ast.__file__).parent)
    name, inner = next(
        p.id.split(":") for p in loaded("pycode").calibration if "." not in p.id.partition(":")[2]
    )
    prompt = dict(iter_code_prompts(modules[name].read_text("utf-8")))[inner]
    assert MIN_CODE_CHARS <= len(prompt) <= MAX_CODE_CHARS
    assert prompt in "\n".join(
        line.rstrip() for line in modules[name].read_text("utf-8").expandtabs(4).split("\n")
    )
    assert f"def {inner}(" in prompt


def test_cuts_need_something_to_go_on_with() -> None:
    short = "def f():\n    return 1\n"
    assert list(iter_code_prompts(short)) == []
    assert list(iter_docstring_prompts(f'"""{"word " * 50}"""', min_chars=600)) == []
    assert len(list(iter_docstring_prompts(f'"""{"word " * 50}"""', min_chars=200))) == 1
    assert list(iter_code_prompts("def broken(:\n")) == []


def test_a_docstring_is_cut_between_words_and_a_table_is_no_prose() -> None:
    words = "plain words of a longer explanation " * 40
    [(name, prompt)] = iter_docstring_prompts(f'"""{words}"""', min_chars=600)
    assert name == ""
    assert words.startswith(prompt + " ")
    assert list(iter_docstring_prompts(f'"""{"| 0x00 | 12.5 | 99 |" * 60}"""', min_chars=600)) == []


def test_a_library_without_sources_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"no standard-library source files in .* task pycode .* \.jsonl file"
    ):
        stdlib.read_stdlib(
            StdlibSource(kind="stdlib", flavour="code"), manifest("pycode"), folder=tmp_path
        )


def test_modules_are_found_by_dotted_name_without_walking_into_other_peoples_packages(
    tmp_path: Path,
) -> None:
    for file in (
        "a.py",
        "b/__init__.py",
        "b/c.py",
        "site-packages/d.py",
        "b/tests/e.py",
        "tomllib/f.py",
        "not-a-name.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert list(stdlib.find_modules(tmp_path)) == ["a", "b", "b.c"]


def manifest(task: str, **changed: object) -> Manifest:
    return read_manifest(manifest_path(task)).model_copy(update=changed)
