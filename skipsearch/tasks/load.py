"""`load_task`: a task's name, folder or file -> its prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from skipsearch.errors import TaskError
from skipsearch.names import unknown
from skipsearch.tasks.manifest import MANIFEST, HubSource, JsonlSource, Manifest, StdlibSource, read_manifest
from skipsearch.tasks.prompts import bare_prompt, rendered, with_shots, without_line_break
from skipsearch.tasks.rows import Pools, Row, prepare
from skipsearch.tasks.sources import hub, jsonl, stdlib
from skipsearch.tasks.split import cut_in_two, shortfall, take_both
from skipsearch.tasks.values import Sampling, Task

BARE_NEW_TOKENS = 128     # of a .jsonl that no manifest describes
BARE_PROMPT_TOKENS = 2048
BARE_CALIBRATION, BARE_HOLDOUT = 96, 32
END_ON_REPEAT = 6         # looping text flatters every draft


def data_folder() -> Path:
    """Where the tasks that come with skipsearch are.

    In a checkout: `calibration_data/` at its root. Installed from a wheel: `share/skipsearch/calibration_data/` under
    `sys.prefix`. Raises: TaskError if neither is there.
    """
    candidates = (Path(__file__).parents[2] / "calibration_data", Path(sys.prefix) / "share" / "skipsearch" / "calibration_data")
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise TaskError(f"the tasks that come with skipsearch are neither in {candidates[0]} nor in {candidates[1]}; "
                    "install it again, or name a task folder of your own")


def task_names() -> tuple[str, ...]:
    """Names of the tasks that come with skipsearch, sorted."""
    return tuple(sorted(path.parent.name for path in data_folder().glob(f"*/{MANIFEST}")))


def load_task(name_or_path: str | Path, *, data: str | Path | None = None) -> Task:
    """The task of a name (`pycode`), a folder with a task.yaml, or a .jsonl file of prompts.

    data: a .jsonl file to take the text from instead of the manifest's own source.
    Raises: TaskError, in one sentence: an unknown name (with the nearest), a manifest that breaks a rule, text that cannot
    be had, or fewer than 2 distinct prompts.
    """
    if Path(name_or_path).suffix == ".jsonl":
        if data is not None:
            raise TaskError(f"{name_or_path} is data itself; give it a task's name to be read with, or leave {data} out")
        return _bare(Path(name_or_path))
    path = manifest_path(name_or_path)
    manifest = read_manifest(path)
    if data is None:
        return _assemble(manifest, _pools(manifest, path), str(path), ())
    return _assemble(manifest, Pools(_rows(Path(data)), None), str(data),
                     (f"text from {Path(data).name} instead of the task's own source",))


def task_name(name_or_path: str | Path) -> str:
    """What `load_task` would call the task of these, without its text: a .jsonl is named for its file, a folder by its manifest.

    A name is itself, whether there is such a task or not. Raises: TaskError for a manifest that breaks a rule.
    """
    path = Path(name_or_path)
    if path.suffix == ".jsonl":
        return path.stem
    return read_manifest(manifest_path(path)).name if path.is_dir() or path.suffix in (".yaml", ".yml") else str(name_or_path)


def task_files(name_or_path: str | Path, *, data: str | Path | None = None) -> tuple[Path, ...]:
    """The files of this machine that `load_task` reads for these arguments, the Hub's aside. Raises: TaskError."""
    if Path(name_or_path).suffix == ".jsonl":
        return (Path(name_or_path),)
    path = manifest_path(name_or_path)
    if data is not None:
        return path, Path(data)
    source = read_manifest(path).source
    return (path, *jsonl.files(source, path.parent)) if isinstance(source, JsonlSource) else (path,)


def manifest_path(name_or_path: str | Path) -> Path:
    """The task.yaml that a task's name or path stands for. Raises: TaskError if there is none."""
    given, names = str(name_or_path), task_names()
    if given in names:
        return data_folder() / given / MANIFEST
    path = Path(given)
    if path.is_dir() and not (path / MANIFEST).is_file():
        raise TaskError(f"{path} holds no {MANIFEST}; a task is a name, a folder with a {MANIFEST}, or a .jsonl file")
    if path.is_dir():
        return path / MANIFEST
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return path
    if path.is_file():
        raise TaskError(f"{path} is a file whose name does not end in .jsonl (prompts, one JSON object a line) or .yaml (a manifest); "
                        "rename it if it is one of them")
    raise TaskError(unknown("task", given, names) + "; a folder with a task.yaml or a .jsonl file is a task too")


def _pools(manifest: Manifest, path: Path) -> Pools:
    match manifest.source:
        case StdlibSource() as source:
            return stdlib.read(source, manifest)
        case JsonlSource() as source:
            return jsonl.read(source, path.parent)
        case HubSource() as source:
            return hub.read(source, manifest)


def _rows(data: Path) -> list[Row]:
    try:
        return jsonl.read_rows(data)
    except TaskError as error:
        if data.suffix == ".jsonl" or not data.is_file():
            raise
        raise TaskError(f"{error}; and {data.name} does not end in .jsonl: is it the right file?") from error


def _bare(path: Path) -> Task:
    prompts = [without_line_break(bare_prompt(row)) for row in jsonl.read_rows(path)]
    calibration, holdout = cut_in_two(prompts, BARE_CALIBRATION, BARE_HOLDOUT, 0, str(path))
    notes = (*shortfall("calibration", calibration, BARE_CALIBRATION), *shortfall("hold-out", holdout, BARE_HOLDOUT))
    return Task(name=path.stem, version=1, description=f"the prompts of {path.name}", sampling=Sampling(),
                max_new_tokens=BARE_NEW_TOKENS, max_prompt_tokens=BARE_PROMPT_TOKENS, end_on_repeat=END_ON_REPEAT, seed=0,
                chat=False, notes=notes, calibration=tuple(calibration), holdout=tuple(holdout))


def _assemble(manifest: Manifest, pools: Pools, where: str, notes: Sequence[str]) -> Task:
    """Rows -> prompts -> halves, in that order, so that no repeated text can stand in both."""
    front, back = ([rendered(row, manifest) for row in prepare(pool or (), manifest)]
                   for pool in (pools.calibration, pools.holdout))
    first, second = with_shots(front, back, manifest)
    sizes = manifest.calibration, manifest.holdout
    halves = (cut_in_two(first, *sizes, manifest.seed, where) if pools.holdout is None
              else take_both(first, second, *sizes, manifest.seed, where))
    whole = sum(item.whole for item in (*front, *back))
    if whole:
        notes = (*notes, f"{whole} rows are whole prompts already and stand without this task's template and shots")
    return Task(name=manifest.name, version=manifest.version, description=manifest.description, sampling=manifest.sampling,
                max_new_tokens=manifest.max_new_tokens, max_prompt_tokens=manifest.max_prompt_tokens,
                end_on_repeat=manifest.end_on_repeat, seed=manifest.seed, chat=manifest.chat,
                notes=(*notes, *shortfall("calibration", halves[0], sizes[0]), *shortfall("hold-out", halves[1], sizes[1])),
                calibration=tuple(halves[0]), holdout=tuple(halves[1]))
