"""Open the files of a task: regular files, and none outside the task's own folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from skipsearch.core.files import IrregularFileError, open_regular
from skipsearch.core.registry import did_you_mean_file
from skipsearch.errors import TaskError


def open_task_file(path: Path) -> BinaryIO:
    """Open a regular file to read, also through links.

    Raises: TaskError for anything that cannot be opened or is not a regular file.
    """
    try:
        return open_regular(path)
    except IrregularFileError as error:
        raise TaskError(f"{path}: {error}; give a regular file") from error
    except (OSError, ValueError) as error:
        hint = did_you_mean_file(path).rstrip() if isinstance(error, FileNotFoundError) else ""
        reason = getattr(error, "strerror", None) or error
        raise TaskError(f"{path}: cannot be read ({reason}){hint and '; '}{hint}") from error


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that a manifest in `folder` names.

    A task is shared as its folder: a file outside is missing elsewhere, or belongs to something
        else.

    Raises: TaskError for a path outside the folder, by `..` or by a link.
    """
    path = folder / name
    if "\0" in name or Path(os.path.realpath(folder)) not in Path(os.path.realpath(path)).parents:
        raise TaskError(
            f"{folder}: its manifest names the file {name!r}, which is not in this folder; put it "
            "there, or name it with "
            "--data"
        )
    return path
