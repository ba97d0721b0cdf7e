"""The files that a task is read from: regular ones, and none outside of the task's own folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from skipsearch.errors import TaskError
from skipsearch.names import near_file


def open_regular(path: Path) -> BinaryIO:
    """A file to read, also through links. A pipe would keep its reader waiting, and a device may never end.

    Raises: TaskError for anything that cannot be opened, or is no regular file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))   # without it, a pipe waits for its writer already here
    except (OSError, ValueError) as error:
        near = near_file(path).rstrip() if isinstance(error, FileNotFoundError) else ""
        raise TaskError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}){near and '; '}{near}") from error
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise TaskError(f"{path}: this is a {'folder' if stat.S_ISDIR(mode) else 'device or pipe'}; give a regular file")


def beside(folder: Path, name: str) -> Path:
    """The file that a manifest in `folder` names. Raises: TaskError for one outside of the folder, be it by `..` or by a link.

    A task that is handed on is its folder: what stands elsewhere is missing there, or is another's file.
    """
    path = folder / name
    if "\0" in name or Path(os.path.realpath(folder)) not in Path(os.path.realpath(path)).parents:
        raise TaskError(f"{folder}: its manifest names the file {name!r}, which is not in this folder; put it there, or name it with "
                        "--data")
    return path
