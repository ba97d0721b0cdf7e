"""The files that a task is read from: regular ones, and none outside of the task's own folder."""

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
    """The file that a manifest in `folder` names. Raises: TaskError for one outside of the folder,
    be it by `..` or by a link.

    A task that is handed on is its folder: what stands elsewhere is missing there, or is another's
    file."""
    path = folder / name
    if "\0" in name or Path(os.path.realpath(folder)) not in Path(os.path.realpath(path)).parents:
        raise TaskError(
            f"{folder}: its manifest names the file {name!r}, which is not in this folder; put it "
            "there, or name it with "
            "--data"
        )
    return path
