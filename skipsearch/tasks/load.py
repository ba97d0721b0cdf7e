"""`load_task`: from the name, folder or file of a task to its prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skipsearch.core.registry import unknown_name
from skipsearch.core.schema_types import to_name
from skipsearch.errors import TaskError
from skipsearch.tasks.conversations import name_conversation
from skipsearch.tasks.manifest import (
    MANIFEST_NAME,
    HubSource,
    JsonlSource,
    Manifest,
    StdlibSource,
    read_manifest,
)
from skipsearch.tasks.prompt_rows import (
    name_read_columns,
    prepend_shots,
    prompt_from_row,
    render_row,
    strip_final_newline,
)
from skipsearch.tasks.rows import Row, RowPools, select_rows
from skipsearch.tasks.sources import hub_dataset, jsonl, stdlib
from skipsearch.tasks.sources.data_files import DATA_SUFFIXES, is_data_file, read_data_file
from skipsearch.tasks.split import pair_pools, shortfall_notes, split_pool
from skipsearch.tasks.task import Task, TaskSampling

JSONL_NEW_TOKENS = 256  # of a .jsonl that no manifest describes
JSONL_PROMPT_TOKENS = 2048
JSONL_CALIBRATION, JSONL_HOLDOUT = 96, 32


def data_folder() -> Path:
    """Return the folder of the tasks that come with skipsearch.

    In a checkout it is `calibration_data/` at its root. Installed from a wheel it is
    `share/skipsearch/calibration_data/` under `sys.prefix`.

    Raises: TaskError if neither exists.
    """
    candidates = (
        Path(__file__).parents[2] / "calibration_data",
        Path(sys.prefix) / "share" / "skipsearch" / "calibration_data",
    )
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise TaskError(
        f"the tasks that come with skipsearch are neither in {candidates[0]} nor in "
        f"{candidates[1]}; "
        "install it again, or name a task folder of your own"
    )


def task_names() -> tuple[str, ...]:
    """Return the names of the tasks that come with skipsearch, sorted."""
    return tuple(sorted(path.parent.name for path in data_folder().glob(f"*/{MANIFEST_NAME}")))


def load_task(
    name_or_path: str | Path, *, data: str | Path | None = None, chat: bool = False
) -> Task:
    """Load the task of a name (`pycode`), a folder with a task.yaml, or a file of prompts.

    data: a file to take the text from instead of the manifest's own source.
    chat: the prompts are requests to a chat model, whatever the manifest says.

    Raises: TaskError, in one sentence, for an unknown name (with the nearest one), an invalid
        manifest, text that cannot be read, or fewer than 2 distinct prompts.
    """
    task = _load_task(name_or_path, data, chat)
    return replace(task, chat=True) if chat else task


def _load_task(name_or_path: str | Path, data: str | Path | None, chat: bool) -> Task:
    if is_data_file(name_or_path):
        if data is not None:
            raise TaskError(
                f"{name_or_path} is data itself; give it a task's name to be read with, or leave "
                f"{data} out"
            )
        return _task_from_data_file(Path(name_or_path), chat)
    path = manifest_path(name_or_path)
    manifest = read_manifest(path)
    if data is None:
        return _task_from_manifest(manifest, _read_pools(manifest, path), str(path), ())
    return _task_from_manifest(
        manifest,
        RowPools(_read_data_rows(Path(data)), None),
        str(data),
        (f"text from {Path(data).name} instead of the task's own source",),
    )


def task_name(name_or_path: str | Path) -> str:
    """Return the name that the task of `load_task` would have, without reading its text.

    A file of prompts is named after itself, a folder by its manifest. A name is returned as it is,
    whether such a task exists or not.

    Raises: TaskError for an invalid manifest.
    """
    path = Path(name_or_path)
    if is_data_file(path):
        return to_name(path.stem)
    return (
        read_manifest(manifest_path(path)).name
        if path.is_dir() or path.suffix in (".yaml", ".yml")
        else str(name_or_path)
    )


def task_files(name_or_path: str | Path, *, data: str | Path | None = None) -> tuple[Path, ...]:
    """Return the local files that `load_task` reads for these arguments, without those of the Hub.

    Raises: TaskError.
    """
    if is_data_file(name_or_path):
        return (Path(name_or_path),)
    path = manifest_path(name_or_path)
    if data is not None:
        return path, Path(data)
    source = read_manifest(path).source
    return (
        (path, *jsonl.list_source_files(source, path.parent))
        if isinstance(source, JsonlSource)
        else (path,)
    )


def manifest_path(name_or_path: str | Path) -> Path:
    """Return the task.yaml of a name or path. Raises: TaskError if there is none."""
    given, names = str(name_or_path), task_names()
    if given in names:
        return data_folder() / given / MANIFEST_NAME
    path = Path(given)
    if path.is_dir() and not (path / MANIFEST_NAME).is_file():
        raise TaskError(
            f"{path} holds no {MANIFEST_NAME}; a task is a name, a folder with a {MANIFEST_NAME}, "
            f"or a file of prompts ({', '.join(DATA_SUFFIXES)})"
        )
    if path.is_dir():
        return path / MANIFEST_NAME
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return path
    if path.is_file():
        raise TaskError(
            f"{path} is a file whose name does not end in {', '.join(DATA_SUFFIXES)} (prompts) or "
            ".yaml (a manifest); "
            "rename it if it is one of them"
        )
    raise TaskError(
        unknown_name("task", given, names)
        + f"; a folder with a task.yaml or a file of prompts ({', '.join(DATA_SUFFIXES)}) is a "
        "task too"
    )


def _read_pools(manifest: Manifest, path: Path) -> RowPools:
    """Read the rows of a manifest's source."""
    match manifest.source:
        case StdlibSource() as source:
            return stdlib.read_stdlib(source, manifest)
        case JsonlSource() as source:
            return jsonl.read_jsonl(source, path.parent)
        case HubSource() as source:
            return hub_dataset.read_hub(source, manifest)


def _read_data_rows(data: Path) -> list[Row]:
    """Read the rows of a file given with data=. Raises: TaskError."""
    try:
        return read_data_file(data)
    except TaskError as error:
        if is_data_file(data) or not data.is_file():
            raise
        raise TaskError(
            f"{error}; and {data.name} does not end in {', '.join(DATA_SUFFIXES)}: is it the right "
            "file?"
        ) from error


def _task_from_data_file(path: Path, chat: bool) -> Task:
    """Return the task of a file of prompts that no manifest describes."""
    rows = read_data_file(path)
    chat = chat or all(name_conversation(row) for row in rows)
    prompts = [strip_final_newline(prompt_from_row(row, chat), row) for row in rows]
    calibration, holdout = split_pool(prompts, JSONL_CALIBRATION, JSONL_HOLDOUT, 0, str(path))
    read_columns = sorted({name_read_columns(row) for row in rows} - {"prompt"})
    notes = (
        *(f"prompts are read from {columns}" for columns in read_columns),
        *shortfall_notes("calibration", calibration, JSONL_CALIBRATION),
        *shortfall_notes("hold-out", holdout, JSONL_HOLDOUT),
    )
    return Task(
        name=to_name(path.stem),
        version=1,
        description=f"the prompts of {path.name}",
        sampling=TaskSampling(),
        max_new_tokens=JSONL_NEW_TOKENS,
        max_prompt_tokens=JSONL_PROMPT_TOKENS,
        end_on_repeat="loop",
        seed=0,
        chat=chat,
        notes=notes,
        calibration=tuple(calibration),
        holdout=tuple(holdout),
    )


def _task_from_manifest(
    manifest: Manifest, pools: RowPools, location: str, notes: Sequence[str]
) -> Task:
    """Render rows to prompts, then split them into calibration and hold-out.

    Rendering comes first, so that two rows with the same prompt text cannot end up in both splits.
    """
    front, back = (
        [render_row(row, manifest) for row in select_rows(pool or (), manifest)]
        for pool in (pools.calibration, pools.holdout)
    )
    first, second = prepend_shots(front, back, manifest)
    sizes = manifest.calibration, manifest.holdout
    calibration, holdout = (
        split_pool(first, *sizes, manifest.seed, location)
        if pools.holdout is None
        else pair_pools(first, second, *sizes, manifest.seed, location)
    )
    n_complete = sum(item.is_complete for item in (*front, *back))
    if n_complete:
        notes = (
            *notes,
            f"{n_complete} rows are complete prompts already, so they are used without this task's "
            "template and shots",
        )
    return Task(
        name=manifest.name,
        version=manifest.version,
        description=manifest.description,
        sampling=manifest.sampling,
        max_new_tokens=manifest.max_new_tokens,
        max_prompt_tokens=manifest.max_prompt_tokens,
        end_on_repeat=manifest.end_on_repeat,
        seed=manifest.seed,
        chat=manifest.chat,
        notes=(
            *notes,
            *shortfall_notes("calibration", calibration, sizes[0]),
            *shortfall_notes("hold-out", holdout, sizes[1]),
        ),
        calibration=tuple(calibration),
        holdout=tuple(holdout),
        constraint=manifest.constraint,
    )
