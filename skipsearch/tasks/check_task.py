"""Check tasks before they are shared.

A manifest must be valid, its name must be that of its folder, and local text must load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skipsearch.errors import TaskError
from skipsearch.tasks.load import load_task
from skipsearch.tasks.manifest import MANIFEST_NAME, HubSource, read_manifest
from skipsearch.tasks.sources.data_files import is_data_file


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """The result for one file.

    problem: the error in one sentence; None if the file is valid.
    summary: a description of the task; empty if there is a problem.
    """

    path: str
    summary: str
    problem: str | None = None


def check_tasks(path: Path) -> list[TaskCheck]:
    """Check every task of a path: a file of prompts, a task.yaml, a task's folder, or their folder.

    Text on the Hub is not downloaded.

    Raises: TaskError if there is no task at the path.
    """
    if path.is_dir() and not (path / MANIFEST_NAME).is_file():
        inside = sorted(path.glob(f"*/{MANIFEST_NAME}"))
        if not inside:
            raise TaskError(
                f"{path} holds no {MANIFEST_NAME}, nor does a folder in it; a task is a folder "
                f"with a {MANIFEST_NAME}"
            )
        return [_check_task(manifest) for manifest in inside]
    return [_check_task(path / MANIFEST_NAME if path.is_dir() else path)]


def _check_task(path: Path) -> TaskCheck:
    try:
        return TaskCheck(str(path), _summarise(path))
    except TaskError as error:
        return TaskCheck(str(path), "", str(error))


def _summarise(path: Path) -> str:
    if not is_data_file(path):
        manifest = read_manifest(path)
        if manifest.name != path.resolve().parent.name:
            raise TaskError(
                f"{path}: name is {manifest.name}, its folder {path.resolve().parent.name}; a task "
                "is found by its "
                "folder, so the two are the same word"
            )
        if isinstance(manifest.source, HubSource):
            return (
                f"{manifest.name}: the manifest is valid; its text is on the Hub and was not "
                "downloaded"
            )
    task = load_task(path)
    return (
        f"{task.name}: {len(task.calibration)} calibration and {len(task.holdout)} hold-out prompts"
    )
