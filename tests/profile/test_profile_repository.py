"""The ready-made files for a repository of profiles: they parse, agree with each other, and run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from profile_samples import speculate

from skipsearch.profile import dump_profile
from skipsearch.profile.paths import profile_path

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs" / "profile-repository"
WORKFLOW = yaml.load(
    (TEMPLATE / ".github/workflows/profiles.yml").read_text(), yaml.BaseLoader
)  # YAML 1.1 reads `on` as true
(OFFERED,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
((LOCAL,),) = (
    repo["hooks"]
    for repo in yaml.safe_load((TEMPLATE / ".pre-commit-config.yaml").read_text())["repos"]
)
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["validate"]["steps"]
COMMANDS = [step["run"] for step in STEPS if "run" in step]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the template with one good profile."""
    folder = tmp_path / "repository"
    shutil.copytree(TEMPLATE, folder)
    path = folder / profile_path(speculate())
    path.parent.mkdir(parents=True)
    path.write_text(dump_profile(speculate()))
    return folder


def validated(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of the files, by this interpreter, and with everything heavy out of reach: the
    workflow does not install it.
    """
    program, *arguments = shlex.split(command)
    assert program == "skipsearch"
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'numpy', 'datasets', 'optuna'): "
        "sys.modules[name] = None\n"
        f"sys.argv = {['skipsearch', *arguments]!r}\nfrom skipsearch.cli.main import main\nmain()"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "command", [COMMANDS[-1], OFFERED["entry"]], ids=["workflow", "pre-commit"]
)
def test_the_check_passes_good_profiles_and_fails_on_a_bad_one(
    command: str, repository: Path
) -> None:
    passed = validated(command, repository)
    assert (passed.returncode, passed.stdout) == (0, "1 valid\n"), passed.stderr
    (repository / "profiles" / "demo" / "pycode" / "other.yaml").write_text(
        dump_profile(speculate())
    )
    failed = validated(command, repository)
    assert failed.returncode == 1
    assert "its content belongs at" in failed.stderr


def test_the_workflow_runs_for_every_change_with_no_right_to_write() -> None:
    assert WORKFLOW["on"] == ["push", "pull_request"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert STEPS[0]["with"] == {"persist-credentials": "false"}


def test_the_workflow_installs_versions_that_the_package_allows() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(shlex.split(COMMANDS[0])[2:]) <= set(wanted)


def test_both_pre_commit_files_describe_the_same_hook() -> None:
    assert LOCAL | {"description": OFFERED["description"]} == OFFERED
    assert not OFFERED["pass_filenames"], (
        "a file named by itself may be anywhere, and that is a fault here"
    )


def test_journals_stay_out_of_the_repository(repository: Path) -> None:
    quiet = {
        "cwd": repository,
        "capture_output": True,
        "text": True,
        "check": True,
        "env": os.environ | {"GIT_CONFIG_GLOBAL": os.devnull},
    }
    (repository / "profiles" / "x.journal").write_text("")
    subprocess.run(["git", "init", "--quiet"], **quiet)
    listed = subprocess.run(["git", "status", "--short", "--untracked-files=all"], **quiet).stdout
    assert "profiles/demo/pycode/" in listed
    assert "journal" not in listed
