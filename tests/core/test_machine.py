"""What a measurement says about the machine and the software it was made with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

import skipsearch
from skipsearch.core import machine
from skipsearch.core.machine import (
    Machine,
    describe_machine,
    load_average,
    software_versions,
    source_commit,
)


def test_a_processor_is_named_with_the_threads_that_torch_uses() -> None:
    here = describe_machine(torch.device("cpu"))
    assert (here.kind, here.count, here.threads) == ("cpu", 1, torch.get_num_threads())
    assert here.name
    assert (
        here.description == f"{here.name}, {here.threads} thread{'s' if here.threads > 1 else ''}"
    )


def test_another_number_of_threads_is_another_machine() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert describe_machine(torch.device("cpu")).description.endswith(f", {before + 1} threads")
    finally:
        torch.set_num_threads(before)


def test_a_gpu_is_named_with_how_many_there_are() -> None:
    assert Machine("cuda", "NVIDIA H200", 2, None).description == "2 × NVIDIA H200"


def test_a_system_that_does_not_name_its_processor_still_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert machine.read_cpu_name()


def test_software_is_what_runs_here() -> None:
    versions = software_versions()
    assert list(versions) == ["skipsearch", "torch", "transformers", "cuda"]
    assert (versions["skipsearch"], versions["torch"], versions["transformers"]) == (
        skipsearch.__version__,
        torch.__version__,
        transformers.__version__,
    )
    assert (versions["cuda"] is None) == (not torch.cuda.is_available())


def test_a_checkout_is_named_by_its_commit_and_whether_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    (tmp_path / "skipsearch").mkdir()
    (tmp_path / "skipsearch" / "machine.py").write_text("first")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "skipsearch" / "core" / "machine.py"))
    assert source_commit() is None, "no checkout, no commit"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "v1")
    commit = source_commit()
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{12}", commit)
    assert git("rev-parse", "HEAD").startswith(commit)
    (tmp_path / "skipsearch" / "machine.py").write_text("second")
    assert source_commit() == f"{commit}-dirty"


def test_without_git_there_is_no_commit_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert source_commit() is None


def test_load_is_told_where_the_system_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load = load_average()
    assert load is None or load >= 0

    def unknown() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr("os.getloadavg", unknown)
    assert load_average() is None
