"""Text of the running interpreter's own standard library: it is on every machine and in no
repository.

The half a module belongs to depends on its package's name alone, so no seed, size or Python version
moves text across."""

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
LONG_LINE_CHARS = 20  # characters; shorter lines (`return None`) are everybody's
MAX_REPEATED_FRACTION = 0.5  # of a prompt's long lines that may stand in earlier prompts
# Not text somebody wrote to be read as a library: tests, tables, examples, other people's packages.
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
    """As many prompts of each half as the manifest asks for, from as many different modules as
    there are.

    folder: where the library's sources are; by default the running interpreter's.
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

    def half(held: bool, wanted: int) -> list[Row]:
        mine = {name: path for name, path in modules.items() if is_held_out(name) == held}
        return _draw_rows(mine, source, manifest.seed, wanted, seen)

    return RowPools(
        calibration=half(False, manifest.calibration), holdout=half(True, manifest.holdout)
    )


def find_modules(root: Path) -> dict[str, Path]:
    """Dotted name -> source file of every module that may give text, sorted by name."""
    found = {}
    for folder, inner, files in os.walk(root):
        inner[:] = [
            name for name in inner if name.isidentifier() and name not in EXCLUDED_FOLDERS
        ]  # not walked into
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if (
                name
                and parts[-1].isidentifier()
                and not any(f"{name}.".startswith(f"{other}.") for other in PUBLISHED_TWICE)
            ):
                found[name] = path
    return dict(sorted(found.items()))


def is_held_out(module: str) -> bool:
    """Whether a module's package is in the hold-out half; packages stay whole, as their modules
    share phrases.
    """
    package = module.partition(".")[0]
    return int(hashlib.sha256(package.encode()).hexdigest(), 16) % HOLDOUT_ONE_IN == 0


def _draw_rows(
    modules: dict[str, Path], source: StdlibSource, seed: int, n_rows: int, seen: set[str]
) -> list[Row]:
    """One prompt from each module in turn, then a second from each, until there are enough."""
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
    try:
        with tokenize.open(path) as file:  # honours a coding line, as the interpreter does
            text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    found = dict(
        iter_code_prompts(text)
        if source.flavour == "code"
        else iter_docstring_prompts(text, source.docstring_least)
    )
    for inner in sorted(found, key=lambda inner: stable_key(seed, f"{name}:{inner}")):
        yield Row(
            f"{name}:{inner}" if inner else name,
            f"{path} ({inner or 'module'})",
            {"text": found[inner]},
        )


def _is_new(row: Row, seen: set[str]) -> bool:
    """Whether a prompt says something that earlier ones, of either half, did not; its lines are
    remembered if so.
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
