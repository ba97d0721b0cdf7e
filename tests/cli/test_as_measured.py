"""Settings that the user left open come from the profile: task, dtype and threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.command import run_in_process
from helpers.profiles import GOLDEN

import skipsearch
from skipsearch.cli.open_model import ProfileSearch, find_auto_dtype, resolve_task
from skipsearch.core import machine
from skipsearch.decoding.as_measured import defaults_from_profile
from skipsearch.engine.native import NoCompilerError, blocks
from skipsearch.profile import load_profile, save_profile
from skipsearch.tasks import load_task, task_name

DEMO_PROFILES = Path(skipsearch.__file__).parent / "demo" / "profiles" / "demo"


def test_a_profile_tuned_on_a_file_is_for_that_file_alone(
    capsys, monkeypatch, tmp_path: Path
) -> None:
    own = load_profile(GOLDEN / "v3_speculate.yaml")
    own = own.model_copy(update={"task": own.task.model_copy(update={"name": "mine"})})
    save_profile(own, tmp_path / "own.yaml")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert task_name(tmp_path / "mine.jsonl") == load_task(tmp_path / "mine.jsonl").name == "mine"
    assert (task_name("pycode"), resolve_task(own, "prose")) == ("pycode", "prose")
    for command in (
        ("bench", "run", "--profile", tmp_path / "own.yaml"),
        ("profile", "verify", tmp_path / "own.yaml"),
    ):
        code, _, said = run_in_process(capsys, monkeypatch, *command)
        assert code == 1
        assert (
            "this profile was tuned on 'mine', which is no task that comes with skipsearch: give "
            "--task with the .jsonl file" in said
        )


@pytest.mark.parametrize(
    ("here", "cpus", "given", "taken"),
    [
        ("Some CPU", 4, ("auto", None), ("bfloat16", 3)),
        ("Some CPU", 2, ("auto", None), ("bfloat16", None)),
        ("Some CPU", 4, ("float32", 1), ("float32", 1)),
        ("Another CPU", 4, ("auto", None), ("bfloat16", None)),
    ],
)
def test_dtype_and_threads_are_the_profiles_where_nobody_says_otherwise(
    monkeypatch, here: str, cpus: int, given: tuple, taken: tuple
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    profile = load_profile(GOLDEN / "v3_speculate.yaml")
    assert profile.hardware is not None
    profile = profile.model_copy(
        update={
            "hardware": profile.hardware.model_copy(
                update={"kind": "cpu", "name": "Some CPU", "threads": 3}
            ),
            "model": profile.model.model_copy(update={"dtype": "bfloat16"}),
        }
    )
    monkeypatch.setattr(machine, "read_cpu_name", lambda: here)
    assert defaults_from_profile(profile, "cpu", given[0], given[1], None) == (*taken, None)


@pytest.mark.parametrize(
    ("dtypes", "taken"),
    [(["bfloat16"], "bfloat16"), (["bfloat16", "float32"], "float32")],
    ids=["the only one", "the one that is loaded without a profile"],
)
def test_auto_loads_the_dtype_of_the_profile_that_it_finds(
    monkeypatch, tmp_path: Path, dtypes: list[str], taken: str
) -> None:
    monkeypatch.setattr(machine, "read_cpu_name", lambda: "Some CPU")
    bundled = DEMO_PROFILES / "pycode" / "amd-epyc--float32.yaml"
    profile = load_profile(bundled)
    assert profile.hardware is not None
    hardware = profile.hardware.model_copy(update={"name": "Some CPU"})
    for dtype in dtypes:
        of_model = profile.model.model_copy(update={"dtype": dtype})
        save_profile(
            profile.model_copy(update={"hardware": hardware, "model": of_model}),
            tmp_path / "demo" / "pycode" / f"some-cpu--{dtype}.yaml",
        )
    search = ProfileSearch("pycode", tmp_path)
    assert find_auto_dtype("demo", search, "cpu") == taken
    assert find_auto_dtype("./missing", search, "cpu") == "auto"


def test_on_another_kind_of_device_everything_stays_open() -> None:
    assert defaults_from_profile(
        load_profile(GOLDEN / "v3_speculate.yaml"), "cpu", "auto", None, None
    ) == ("auto", None, None)


def test_a_found_profile_whose_drafts_cannot_run_here_leaves_plain_decoding(
    capsys, monkeypatch
) -> None:
    def need_compiler() -> None:
        raise NoCompilerError("the engine native needs a C++ compiler")

    monkeypatch.setattr(blocks, "load_or_build", need_compiler)
    profiles = DEMO_PROFILES / "prose"
    assert all("weights: int" in path.read_text() for path in profiles.glob("*.yaml"))
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *("decode", "--model", "demo", "--profile", "auto", "--task", "prose"),
        *("--engine", "lean", "--prompt", "It was", "--max-new-tokens", "4"),
    )
    assert code == 0
    assert "cannot run here, so decoding is plain: the engine native needs a C++ compiler" in said
