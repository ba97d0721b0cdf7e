"""Rows of local files: one JSON object a line, UTF-8, without blank lines. Errors name the line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import JsonlSource
from skipsearch.tasks.prompt_rows import prompt_from_row
from skipsearch.tasks.rows import Row, RowPools
from skipsearch.tasks.task import Prompt
from skipsearch.tasks.task_files import open_task_file, resolve_inside

EXAMPLE = '{"prompt": "…"}'
ID_COLUMNS = ("id", "question_id", "task_id", "prompt_id")


def read_jsonl(source: JsonlSource, folder: Path) -> RowPools:
    """Read the rows of a manifest's files, whose paths are relative to its folder."""
    calibration, *holdout = map(read_rows, list_source_files(source, folder))
    return RowPools(calibration, holdout[0] if holdout else None)


def list_source_files(source: JsonlSource, folder: Path) -> tuple[Path, ...]:
    """Return the one or two files that a manifest in `folder` names.

    Raises: TaskError for a file outside the folder.
    """
    return tuple(
        resolve_inside(folder, name)
        for name in (source.path, source.holdout_path)
        if name is not None
    )


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file.

    Raises: TaskError that names file and line, if the file cannot be read, is no regular file or
        has no line, or if a line is not UTF-8 or not a JSON object.
    """
    with open_task_file(path) as lines:
        try:
            rows = parse_rows(lines, str(path))
        except OSError as error:
            raise TaskError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not rows:
        raise TaskError(f"{path}: holds no line; give one object such as {EXAMPLE} a line")
    return rows


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Return every line's prompt in the file's order, repetitions included."""
    return tuple(prompt_from_row(row) for row in read_rows(path))


def parse_rows(lines: Iterable[bytes], name: str) -> list[Row]:
    """Parse the rows of raw lines. name: of the file, for errors."""
    return list(iter_rows(lines, name))


def iter_rows(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """Yield rows as `parse_rows` returns them, each as soon as its line has been read."""
    taken: set[str] = set()
    for number, line in enumerate(lines, start=1):
        location = f"{name}, line {number}"
        columns = _parse_object(
            line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, location
        )
        if columns is None:
            continue
        given = next(
            (columns[key] for key in ID_COLUMNS if isinstance(columns.get(key), str | int)), None
        )
        identity = f"line-{number}" if given is None else str(given)
        yield Row(
            identity if identity not in taken else f"{identity}@line-{number}", location, columns
        )
        taken.add(identity)


def _parse_object(line: bytes, location: str) -> Mapping[str, Any] | None:
    """Parse one line; None if it is blank. Raises: TaskError."""
    try:
        text = line.decode("utf-8").strip()
        value = json.loads(text) if text else None
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{location}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8"
        ) from error
    except ValueError as error:
        reason = (
            f"{error.msg}, column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise TaskError(
            f"{location}: not JSON ({reason}); a line is one object such as {EXAMPLE}"
        ) from error
    except RecursionError as error:
        raise TaskError(f"{location}: nested too deeply to be a row of text") from error
    if text and not isinstance(value, dict):
        raise TaskError(
            f"{location}: a {type(value).__name__}, not an object; a line is one object such as "
            f"{EXAMPLE}"
        )
    return value
