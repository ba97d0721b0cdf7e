"""No command overwrites a file that it reads, by any name or link, also with --force."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.command import cmd, run_in_process
from helpers.profiles import GOLDEN
from report.studies import make_study

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    make_study(folder / "search.journal", {"gp": 2}).close()
    make_study(f"sqlite:///{folder / 'search.db'}", {"gp": 2})
    return folder


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    studies: Path,
) -> Run:
    """Return (exit status, stderr) of a command, which must change nothing in its folder."""

    def command(*arguments: object) -> tuple[int, str]:
        before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
        status, out, err = run_in_process(capsys, monkeypatch, *arguments)
        assert out == ""
        assert {
            path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()
        } == before
        return status, err

    monkeypatch.chdir(tmp_path)
    for name in ("search.journal", "search.db"):
        shutil.copy(studies / name, name)
    shutil.copy(GOLDEN / "v3_speculate.yaml", "own.yaml")
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"question": n * "ab"}) + "\n" for n in (1, 2))
    )
    Path("task.yaml").write_text(
        "name: few\nversion: 1\ndescription: x\nsource: {kind: jsonl, path: rows.jsonl}\ntemplate: "
        '"{question}"'
        "\nmax_new_tokens: 9\nmax_prompt_tokens: 9\nsampling: {}\ncalibration: 1\nholdout: "
        "1\nseed: 0\n"
        "end_on_repeat: 6\n"
    )
    Path("folder").mkdir()
    for name in ("own.yaml", "search.journal", "search.db"):
        Path(f"link-{name}").symlink_to(name)
        os.link(name, f"hard-{name}")
    return command


def names(name: str) -> list[str]:
    return [name, f"folder/../{name}", f"link-{name}", f"hard-{name}"]


@pytest.mark.parametrize("out", names("own.yaml"))
def test_a_report_is_not_written_over_its_profile(run: Run, tmp_path: Path, out: str) -> None:
    for place in (out, tmp_path / out):
        status, err = run(*cmd("report own.yaml --out {} --force", place))
        assert (status, err) == (
            1,
            f"error: --out {place} is the file of PROFILE, which would be lost: write another "
            "with --out",
        )


@pytest.mark.parametrize("out", [*names("search.journal"), *names("search.db")])
def test_a_report_is_not_written_over_its_study(run: Run, out: str) -> None:
    study = "search.journal" if out.endswith("journal") else "sqlite:///search.db#skipsearch"
    status, err = run(*cmd("report --study {} --out {} --force", study, out))
    assert (status, err) == (
        1,
        f"error: --out {out} is the file of --study, which would be lost: write another with --out",
    )


@pytest.mark.parametrize(
    ("arguments", "lost"),
    [
        (cmd("--out search.journal --study search.journal"), "--study"),
        (cmd("--out link-search.journal --study search.journal"), "--study"),
        (["--out", "new.journal"], "--study"),
        (["--out", "folder/../new.journal"], "--study"),
        (cmd("--out search.db --study sqlite:///search.db"), "--study"),
        (["--out", "task.yaml"], "--task or --data"),
        (["--out", "rows.jsonl"], "--task or --data"),
        (cmd("--out hard-own.yaml --data own.yaml"), "--task or --data"),
    ],
)
def test_a_search_does_not_replace_its_own_study_or_text(
    run: Run, arguments: list[str], lost: str
) -> None:
    Path("own.yaml").write_bytes(Path("rows.jsonl").read_bytes())
    for way in ("--force", "--resume"):
        status, err = run(*cmd("tune --model demo --task ."), *arguments, way)
        assert status == 1
        assert f"is the file of {lost}, which would be lost: write another with --out" in err


@pytest.mark.parametrize("out", ["pipe", "/dev/null"])
def test_neither_a_pipe_nor_a_device_is_replaced_by_a_file(run: Run, out: str) -> None:
    os.mkfifo("pipe")
    for command in (
        cmd("report own.yaml --out {} --force", out),
        cmd("tune --model demo --task . --out {} --force", out),
    ):
        status, err = run(*command)
        assert status == 1
        assert f"--out {out} is a device or pipe; name a file to write" in err
    status, err = run(*cmd("tune --model demo --task . --out new.yaml --study {} --force", out))
    assert status == 1
    assert f"the study {out} is a device or pipe: name a file with --study" in err
    assert Path(out).exists()


def test_an_import_replaces_no_file_that_it_reads(run: Run) -> None:
    """A file of the folder that has other content is not replaced."""
    Path("skip_layers.json").write_text(json.dumps({"llama-2-13b": {"attention": [1], "mlp": [2]}}))
    place = Path("folder/profiles/meta-llama--Llama-2-13b-hf/any/any--any.yaml")
    place.parent.mkdir(parents=True)
    place.symlink_to("../../../../skip_layers.json")
    status, err = run("profile", "import", "skip_layers.json", "--out", "folder")
    assert status == 1
    assert "this is a symbolic link" in err
