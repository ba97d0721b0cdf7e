"""Rows of a data set on the Hugging Face Hub: named files at a pinned revision, so that two
machines read the same bytes.

Files and not splits: given a split, `datasets` fetches every split of the config (gigabytes, for 96
prompts) and, offline, falls back to whatever revision it has. A file of a pinned commit is
downloaded once and needs no network afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import HubSource, Manifest
from skipsearch.tasks.rows import Row, RowPools
from skipsearch.tasks.sources.jsonl import read_rows

MAX_POOL_ROWS = 2000  # rows of one file at most; of more, the task's seed draws
T = TypeVar("T")


def read_hub(source: HubSource, manifest: Manifest) -> RowPools:
    """Raises: TaskError in one sentence: offline, gated, no such data set, revision or file, or a
    file that is damaged.
    """

    def half(files: Sequence[str]) -> list[Row]:
        return [
            row
            for file in files
            for row in _read_rows(
                download_file(source, file, manifest.name), file, source, manifest.seed
            )
        ]

    return RowPools(
        half(source.calibration_files),
        None if source.holdout_files is None else half(source.holdout_files),
    )


def download_file(source: HubSource, file: str, task: str) -> Path:
    """The local copy of a file of the data set, downloaded if the cache does not have this revision
    of it.
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
    where, stem = f"{source.repo}/{file}", Path(file).stem
    if path.suffix == ".jsonl":
        return [
            Row(f"{stem}-{row.id}", row.location, row.columns)
            for row in _draw_rows(read_rows(path), seed)
        ]
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"{where} is a parquet file, for which the library datasets is not installed; install "
            "it, "
            "or give a local .jsonl file"
        ) from error
    try:
        table = datasets.load_dataset("parquet", data_files=str(path), split="train")
        return [
            Row(f"{stem}-{index}", f"{where}, row {index}", table[index])
            for index in _draw_rows(range(len(table)), seed)
        ]
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        raise TaskError(
            f"{where} is not readable as parquet ({_first_line(error)}); remove {path} and load it "
            "again"
        ) from error


def _draw_rows(items: Sequence[T], seed: int) -> list[T]:
    return random.Random(seed).sample(items, min(len(items), MAX_POOL_ROWS))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
