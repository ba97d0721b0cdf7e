"""Rows of a dataset on the Hugging Face Hub: named files at a pinned revision, so that two machines
read the same bytes.

A manifest names files and not splits. Given a split, `datasets` downloads every split of the config
(gigabytes, for 96 prompts) and, offline, uses any revision that it has. A file of a pinned commit
is downloaded once and needs no network afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import HubSource, Manifest
from skipsearch.tasks.rows import Row, RowPools
from skipsearch.tasks.sources.jsonl import read_rows
from skipsearch.tasks.sources.parquet import open_parquet

MAX_POOL_ROWS = 2000  # the most rows of one file; the task's seed draws them
T = TypeVar("T")


def read_hub(source: HubSource, manifest: Manifest) -> RowPools:
    """Read the rows of a Hub dataset, downloading its files if they are not cached.

    Raises: TaskError if the Hub is unreachable, the dataset is gated, the dataset, revision or file
        does not exist, or a file is corrupt.
    """

    def read_files(files: Sequence[str]) -> list[Row]:
        return [
            row
            for file in files
            for row in _read_rows(
                download_file(source, file, manifest.name), file, source, manifest.seed
            )
        ]

    return RowPools(
        read_files(source.calibration_files),
        None if source.holdout_files is None else read_files(source.holdout_files),
    )


def download_file(source: HubSource, file: str, task: str) -> Path:
    """Return the local copy of a file of the dataset.

    It is downloaded if the cache does not have this revision. Raises: TaskError.
    """
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError as error:
        raise TaskError(
            f"task {task} reads {source.repo} from the Hub, for which huggingface_hub is not "
            "installed; install it, "
            "or give a local file with data="
        ) from error
    what = f"task {task}: {source.repo}"
    try:
        return Path(
            hf_hub_download(source.repo, file, repo_type="dataset", revision=source.revision)
        )
    except errors.GatedRepoError as error:
        raise TaskError(
            f"{what} is gated; accept its terms on huggingface.co/datasets/{source.repo} and log "
            "in with "
            "`hf auth login`, or give a local file"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise TaskError(
            f"{what} has no revision {source.revision}; correct the pin in the manifest"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise TaskError(
            f"{what} is not a data set on the Hub, or a private one; check the name, log in with "
            "`hf auth login`, "
            "or give a local file"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise TaskError(
            f"{what} ({file}) is not in the local cache and the Hub cannot be reached; connect "
            "once to download it, "
            "or give a local file"
        ) from error
    except errors.EntryNotFoundError as error:
        raise TaskError(
            f"{what} has no file {file} at revision {source.revision}; correct it in the manifest"
        ) from error
    except (errors.HFValidationError, OSError) as error:
        raise TaskError(f"{what} ({file}) cannot be downloaded: {_first_line(error)}") from error


def _read_rows(path: Path, file: str, source: HubSource, seed: int) -> list[Row]:
    """Read rows of a .jsonl or .parquet file. Raises: TaskError."""
    location, stem = f"{source.repo}/{file}", Path(file).stem
    if path.suffix == ".jsonl":
        return [
            Row(f"{stem}-{row.id}", row.location, row.columns)
            for row in _draw_rows(read_rows(path), seed)
        ]
    table = open_parquet(
        path, location, in_memory=False, way_out=f"; remove {path} and load it again"
    )
    return [
        Row(f"{stem}-{index}", f"{location}, row {index}", table[index])
        for index in _draw_rows(range(len(table)), seed)
    ]


def _draw_rows(items: Sequence[T], seed: int) -> list[T]:
    """Draw at most MAX_POOL_ROWS rows by the seed."""
    return random.Random(seed).sample(items, min(len(items), MAX_POOL_ROWS))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
