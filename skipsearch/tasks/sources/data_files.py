"""Rows of a local file of prompts, by the ending of its name: .jsonl, .json, .csv or .parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skipsearch.errors import TaskError
from skipsearch.tasks.rows import Row
from skipsearch.tasks.sources import jsonl
from skipsearch.tasks.sources.parquet import open_parquet
from skipsearch.tasks.task_files import open_task_file

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_FIELD_CHARACTERS = 1 << 24  # of a .csv


def is_data_file(path: str | Path) -> bool:
    """Return whether a name ends as that of a file of prompts."""
    return Path(path).suffix in DATA_SUFFIXES


def read_data_file(path: Path) -> list[Row]:
    """Read the rows of a file; an ending that is not in DATA_SUFFIXES is read as .jsonl.

    Raises: TaskError that names the file, and the line or row if one is wrong.
    """
    readers = {".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix not in readers:
        return jsonl.read_rows(path)
    records = readers[path.suffix](path)
    rows = [
        Row(f"row-{number}", f"{path}, row {number}", record)
        for number, record in enumerate(records, start=1)
    ]
    if not rows:
        raise TaskError(f"{path}: holds no row; give one prompt a row, such as {jsonl.EXAMPLE}")
    return rows


def _read_json(path: Path) -> Iterable[Mapping[str, Any]]:
    """Read a list of objects."""
    text = _read_text(path)
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{path}: not JSON ({error}); a .json file is a list of objects such as "
            f"{jsonl.EXAMPLE}, and a file with one object a line is a .jsonl"
        ) from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise TaskError(
            f"{path}: is no list of objects; write one such as [{jsonl.EXAMPLE}, …], or one object "
            "a line in a .jsonl"
        )
    return records


def _read_csv(path: Path) -> Iterable[Mapping[str, Any]]:
    """Read a table whose first line names the columns."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    try:
        return [
            {name: value for name, value in record.items() if name and value is not None}
            for record in csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
        ]
    except csv.Error as error:
        raise TaskError(f"{path}: not CSV ({error}); its first line names the columns") from None


def _read_parquet(path: Path) -> Iterable[Mapping[str, Any]]:
    open_task_file(path).close()
    return open_parquet(path, str(path), in_memory=True)


def _read_text(path: Path) -> str:
    with open_task_file(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise TaskError(
                f"{path}: not UTF-8 (byte {error.start}); save the file as UTF-8"
            ) from None
