"""Rows of the running interpreter's standard library. Its text is on every machine and in no
repository.

The split of a module depends on the name of its package alone. So no seed, size or Python version
moves text from one split to the other.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from skipsearch.errors import TaskError
from skipsearch.tasks.manifest import Manifest, StdlibSource
from skipsearch.tasks.rows import Row, RowPools
from skipsearch.tasks.sources.python_prompts import iter_code_prompts, iter_docstring_prompts
from skipsearch.tasks.split import stable_key

HOLDOUT_ONE_IN = 3
LONG_LINE_CHARS = 20  # characters; shorter lines (`return None`) are in many files
MAX_REPEATED_FRACTION = (
    0.5  # the largest part of a prompt's long lines that earlier prompts may have
)
# Folders of tests, tables, examples and other packages, which are not the library's own code.
EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "encodings",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "pydoc_data",
    "__pycache__",
    "__phello__",
    "_vendor",
}
# Also published as packages of their own (tomli, mock, setuptools, …), so a model may have been
# trained on them.
PUBLISHED_TWICE = (
    "distutils",
    "importlib.metadata",
    "importlib.resources",
    "tomllib",
    "typing",
    "unittest.mock",
    "zoneinfo",
)


def read_stdlib(source: StdlibSource, manifest: Manifest, folder: Path | None = None) -> RowPools:
    """Read as many prompts for each split as the manifest wants, from as many different modules as
    possible.

    folder: the sources of the library; by default those of the running interpreter.

    Raises: TaskError if there are no source files (a zipped or compiled-only library).
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    modules = find_modules(root)
    if not modules:
        raise TaskError(
            f"this Python has no standard-library source files in {root}, which task "
            f"{manifest.name} takes its "
            "text from; use a Python installed with them, or give a .jsonl file"
        )
    seen: set[str] = set()

    def draw_split(held_out: bool, n_rows: int) -> list[Row]:
        own = {name: path for name, path in modules.items() if is_held_out(name) == held_out}
        return _draw_rows(own, source, manifest.seed, n_rows, seen)

    return RowPools(
        calibration=draw_split(False, manifest.calibration),
        holdout=draw_split(True, manifest.holdout),
    )


def find_modules(root: Path) -> dict[str, Path]:
    """Return the source file of every module that may be used, by dotted name, sorted."""
    modules = {}
    for folder, inner, files in os.walk(root):
        # `os.walk` does not enter folders that are removed here.
        inner[:] = [name for name in inner if name.isidentifier() and name not in EXCLUDED_FOLDERS]
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if (
                name
                and parts[-1].isidentifier()
                and not any(f"{name}.".startswith(f"{other}.") for other in PUBLISHED_TWICE)
            ):
                modules[name] = path
    return dict(sorted(modules.items()))


def is_held_out(module: str) -> bool:
    """Return whether the package of a module is in the hold-out split.

    Packages are not divided, because their modules share phrases.
    """
    package = module.partition(".")[0]
    return int(hashlib.sha256(package.encode()).hexdigest(), 16) % HOLDOUT_ONE_IN == 0


def _draw_rows(
    modules: dict[str, Path], source: StdlibSource, seed: int, n_rows: int, seen: set[str]
) -> list[Row]:
    """Draw one prompt from each module in turn, then a second from each, until there are enough."""
    rows: list[Row] = []
    waiting = [
        (_candidate_rows(name, path, source, seed), 0)
        for name, path in sorted(modules.items(), key=lambda item: stable_key(seed, item[0]))
    ]
    while waiting and len(rows) < n_rows:
        candidates, taken = waiting.pop(0)
        row = next((row for row in candidates if _is_new(row, seen)), None)
        if row:
            rows.append(row)
            if taken + 1 < source.per_module:
                waiting.append((candidates, taken + 1))
    return rows


def _candidate_rows(name: str, path: Path, source: StdlibSource, seed: int) -> Iterator[Row]:
    """Yield the prompts of a module in the order of the seed."""
    try:
        with tokenize.open(path) as file:  # honours a coding line, as the interpreter does
            text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    prompts = dict(
        iter_code_prompts(text)
        if source.flavour == "code"
        else iter_docstring_prompts(text, source.docstring_least)
    )
    for inner in sorted(prompts, key=lambda inner: stable_key(seed, f"{name}:{inner}")):
        yield Row(
            f"{name}:{inner}" if inner else name,
            f"{path} ({inner or 'module'})",
            {"text": prompts[inner]},
        )


def _is_new(row: Row, seen: set[str]) -> bool:
    """Return whether most long lines of a prompt are not in earlier prompts of either split.

    If so, its lines are added to `seen`.
    """
    lines = {
        line.strip()
        for line in str(row.columns["text"]).split("\n")
        if len(line.strip()) >= LONG_LINE_CHARS
    }
    if len(lines & seen) > MAX_REPEATED_FRACTION * len(lines):
        return False
    seen |= lines
    return True
