"""Scores of answers: final numbers, ROUGE, and programs that run with limits."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

import skipsearch as ss
from skipsearch.bench import score_table
from skipsearch.bench.generated_code import passes_tests
from skipsearch.bench.score_table import score_systems
from skipsearch.bench.scoring import (
    cut_answer,
    find_final_number,
    make_scorer,
    score_exact_match,
    score_program,
)
from skipsearch.bench.systems import SkipsearchSystem, make_systems
from skipsearch.errors import DecodeError
from skipsearch.tasks import Task, load_task
from skipsearch.tasks.task import TaskScore

GSM8K = [
    {"question": f"What is {n} + {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}"}
    for n in range(8)
]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 and 4 make 7", "7"),
        ("#### 18\nThe 20 others", "18"),
        ("She pays $1,234.50.", "1234.50"),
        ("it falls by -3 degrees", "-3"),
        ("#### none, but 5 before", "5"),
        ("7 ####", "7"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_text(text: str, number: str | None) -> None:
    assert find_final_number(text) == (None if number is None else Decimal(number))


def test_exact_match_compares_values_and_not_digits() -> None:
    assert score_exact_match("", "The answer is 18.00.", "… #### 18") == {"exact match": 1.0}
    assert score_exact_match("", "The answer is 19.", "… #### 18") == {"exact match": 0.0}
    assert score_exact_match("", "I do not know.", "… #### 18") == {"exact match": 0.0}
    assert score_exact_match("", "no number", "no number either") == {"exact match": 0.0}


def test_an_answer_ends_before_the_first_of_its_ends() -> None:
    assert cut_answer("one\ndef two\nclass three", ["\nclass", "\ndef"]) == "one"
    assert cut_answer("one", ["\nclass"]) == "one"
    assert cut_answer("one", []) == "one"


def test_a_program_passes_if_its_tests_do() -> None:
    prompt, tests = "def add(a, b):\n", "assert add(1, 2) == 3"
    assert score_program(prompt, "    return a + b", tests) == {"pass@1": 1.0}
    assert score_program(prompt, "    return a - b", tests) == {"pass@1": 0.0}
    assert score_program(prompt, "    return a +", tests) == {"pass@1": 0.0}


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "print(__import__('os').getpid()); 1 / 0",
        "x = bytearray(4 << 30)",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import ctypes; ctypes.CDLL(None).getpid()",
        "open('large', 'wb').write(bytes(8 << 20))",
    ],
)
def test_what_a_program_may_not_do_fails_it(program: str) -> None:
    assert not passes_tests(program)


def test_a_program_changes_no_file_outside_its_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    for attempt in (
        f"open({str(kept)!r}, 'w')",
        f"open({str(kept)!r}, 'r+')",
        f"__import__('os').open({str(kept)!r}, 1)",
        f"__import__('os').remove({str(kept)!r})",
        f"__import__('os').rename({str(kept)!r}, 'here')",
        f"__import__('shutil').rmtree({str(tmp_path)!r})",
        f"__import__('pathlib').Path({str(kept)!r}).unlink()",
        f"__import__('pathlib').Path({str(tmp_path / 'new')!r}).mkdir()",
    ):
        assert not passes_tests(attempt), attempt
        assert [path.name for path in tmp_path.iterdir()] == ["kept"], attempt
        assert kept.read_text() == "kept", attempt
    assert passes_tests("open('own', 'w').write('x'); assert open('own').read() == 'x'")
    assert passes_tests("import math, re, collections, json, typing, itertools, heapq, datetime")


def test_a_program_has_no_environment_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    assert passes_tests("import os; assert 'SECRET_TOKEN' not in os.environ")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is the kernel's")
def test_a_program_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipsearch.bench.generated_code.CPU_LIMIT_S", 1)
    monkeypatch.setattr("skipsearch.bench.generated_code.RUN_TIMEOUT_S", 3)
    started = time.monotonic()
    assert not passes_tests("while True: pass")
    assert not passes_tests("import time; time.sleep(60)")
    assert time.monotonic() - started < 30


def task_with(metric: str, folder: Path) -> Task:
    data = folder / "gsm8k.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in GSM8K), "utf-8")
    task = load_task("gsm8k", data=data)
    return replace(task, score=TaskScore.model_validate({"metric": metric, "target": "{answer}"}))


def test_rouge_is_that_of_the_package(tmp_path: Path) -> None:
    scores = make_scorer(task_with("rouge", tmp_path))("", "the cat sat on the mat", "the cat sat")
    assert list(scores) == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
    assert scores["ROUGE-1"] == pytest.approx(2 / 3)
    assert scores["ROUGE-2"] == pytest.approx(2 * (2 / 5) / (2 / 5 + 1))


def test_programs_run_only_if_the_user_allows_it(tmp_path: Path) -> None:
    task = task_with("pass@1", tmp_path)
    with pytest.raises(DecodeError, match="--run-generated-code"):
        make_scorer(task)
    assert make_scorer(task, run_generated_code=True) is score_program


def test_a_task_without_a_score_and_rows_without_a_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="pycode has no score"):
        make_scorer(load_task("pycode"))
    task = task_with("exact_match", tmp_path)
    unscored = replace(task, holdout=tuple(replace(p, target="") for p in task.holdout))
    systems = systems_of("plain")
    with pytest.raises(DecodeError, match="no hold-out prompt"):
        score_systems(systems, unscored)


def test_each_builtin_score_finds_its_target_in_a_row(tmp_path: Path) -> None:
    rows = {
        "gsm8k": {"question": "1 + 1?", "answer": "#### 2"},
        "cnndm": {"article": "Long.", "highlights": "Short."},
        "xsum": {"document": "Long.", "summary": "Short."},
        "humaneval": {"prompt": "def f():\n", "test": "def check(c): pass", "entry_point": "f"},
    }
    targets = {"gsm8k": "#### 2", "cnndm": "Short.", "xsum": "Short."}
    for name, row in rows.items():
        data = tmp_path / f"{name}.jsonl"
        first = next(iter(row))
        lines = [{**row, first: f"{row[first]} {n}"} for n in range(4)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        task = load_task(name, data=data)
        for prompt in (*task.calibration, *task.holdout):
            assert prompt.target == targets.get(name, "def check(c): pass\ncheck(f)")


def test_a_target_has_no_part_in_the_hash_of_the_text(tmp_path: Path) -> None:
    task = task_with("exact_match", tmp_path)
    bare = replace(task, calibration=tuple(replace(p, target="") for p in task.calibration))
    assert bare.calibration_sha256 == task.calibration_sha256


def systems_of(*names: str) -> list[SkipsearchSystem]:
    model = ss.load_model("demo", device="cpu", dtype="float32", engine="lean")
    made = make_systems(names, "lean", None, lambda engine: model)
    return [system for system in made if isinstance(system, SkipsearchSystem)]


@pytest.mark.thorough
def test_drafts_change_no_greedy_answer_and_so_no_score(tmp_path: Path) -> None:
    task = replace(task_with("exact_match", tmp_path), max_new_tokens=24)
    seen: list[tuple[int, int]] = []
    systems = systems_of("plain", "lookup+skip")
    n_prompts = len(task.holdout)
    rows = score_systems(systems, task, samples=2, progress=lambda *args: seen.append(args))
    assert [(row.system, row.sampling, row.samples) for row in rows] == [
        ("plain", "greedy", 1),
        ("lookup+skip", "greedy", 1),
        ("plain", "temperature 0.6, top_p 0.95", 2),
        ("lookup+skip", "temperature 0.6, top_p 0.95", 2),
    ]
    plain, drafted, *sampled = rows
    assert plain.score == drafted.score
    assert plain.identical == drafted.identical == n_prompts
    assert [row.identical for row in sampled] == [None, None]
    assert seen[-1] == (seen[-1][1],) * 2 == (2 * 3 * n_prompts,) * 2


def test_a_right_answer_scores_one_and_a_wrong_one_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of a metric over prompts, with answers that are given."""
    task = task_with("exact_match", tmp_path)
    targets = {p.id: p.target for p in task.holdout}
    right = sorted(targets)[0]
    names = iter([p.id for p in task.holdout] * 4)
    monkeypatch.setattr(
        score_table,
        "_write_answer",
        lambda *args: targets[name] if (name := next(names)) == right else "no number",
    )
    row = score_systems(systems_of("plain"), task, samples=1)[0]
    assert row.score.mean == pytest.approx(1 / len(targets))
    assert 0 <= row.score.low <= row.score.mean <= row.score.high <= 1
