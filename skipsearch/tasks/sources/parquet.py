"""Rows of parquet files, by the library `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skipsearch.errors import TaskError


def open_parquet(
    path: Path, name: str, *, in_memory: bool, way_out: str = ""
) -> Sequence[Mapping[str, Any]]:
    """Open a table, whose rows are read when they are asked for.

    name: of the file, for errors. in_memory: no copy of the table is written to the cache of
    `datasets`. way_out: the end of the error's sentence. Raises: TaskError.
    """
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"{name} is a parquet file, for which the library datasets is not installed; install "
            "it, or give a local .jsonl file"
        ) from error
    try:
        return datasets.Dataset.from_parquet(str(path), keep_in_memory=in_memory)
    except Exception as error:  # the library raises errors of pyarrow, of its own and of the disk
        text = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise TaskError(
            f"{name} is not readable as parquet ({text or type(error).__name__}){way_out}"
        ) from None
