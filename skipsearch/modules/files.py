"""Module files on disk: finding the one that is meant, and its header, without trusting anything in it. Nothing here loads torch.

A module is a safetensors file: eight bytes that give the length of a header, the header as JSON, the tensors. Its card stands in the
header's metadata. What is wrong with a file comes out as one sentence, and no part of a file is ever run.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from skipsearch.errors import ModuleError
from skipsearch.fields import ModuleRef
from skipsearch.modules.card import Card

MOST_BYTES = 4 * 2**30        # of a file
MOST_HEADER = 4 * 2**20
MOST_TENSORS = 20_000
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
CARD = "skipsearch-module-1"   # under which the metadata hold the card, and nothing else, so that equal modules are equal files
WAY_OUT = "get the file again from where it came, or train one: skipsearch train --help"


@dataclass(frozen=True)
class Header:
    """card: what the file says of itself. shapes: of its tensors, by name."""

    card: Card
    shapes: dict[str, tuple[int, ...]]

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def find(ref: ModuleRef, folders: Sequence[Path]) -> Path:
    """The file that `ref` means: the first of that name in these folders whose hash is the right one.

    Raises: ModuleError, saying what was found instead.
    """
    there = [path for folder in folders if os.path.lexists(path := folder / ref.file)]
    if not there:
        looked = " and ".join(map(str, folders)) or "no folder at all: give the one that holds it"
        raise ModuleError(f"the module {ref.file} is not there; it was looked for in {looked}")
    for path in there:
        if sha256(path) == ref.sha256:
            return path
    raise ModuleError(f"{there[0]}: this is not the module that was measured (its hash is not {ref.sha256[:12]}…); {WAY_OUT}")


def sha256(path: Path) -> str:
    """Of a module's file. Raises: ModuleError if it cannot be one."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reference(path: Path, name: str) -> ModuleRef:
    """How a profile names this file, `name` being its path from there. Raises: ModuleError."""
    header = read_header(path)
    try:
        return ModuleRef(file=name, sha256=sha256(path), parameters=max(1, header.parameters))
    except ValidationError:
        raise ModuleError(f"{name!r} cannot be the name of a module in a profile: letters, digits and `._-/`, ending in "
                          ".safetensors") from None


def read_header(path: Path) -> Header:
    """Card and shapes, checked against the file's size. Raises: ModuleError."""
    with _opened(path) as file:
        return parse_header(file, os.fstat(file.fileno()).st_size, str(path))


def parse_header(file: BinaryIO, size: int, name: str) -> Header:
    """As `read_header`, of anything that can be read. size: of all of it. Raises: ModuleError."""
    entries = _entries(file, size, name)
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict) or CARD not in metadata:
        raise ModuleError(f"{name}: this is a safetensors file, but no module of skipsearch: its header has no card")
    try:
        card = Card.model_validate_json(metadata[CARD])
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise ModuleError(f"{name}: its card cannot be read ({_first(error)}); {WAY_OUT}") from None
    return Header(card, {key: tuple(entry["shape"]) for key, entry in entries.items()})


def modules_in(folder: Path) -> Iterator[Path]:
    """Every *.safetensors of a folder, by name. Raises: ModuleError if it is no folder or has none."""
    if not folder.is_dir():
        raise ModuleError(f"{folder} is not a folder: name the one that `skipsearch train --out` made")
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not found:
        raise ModuleError(f"{folder} holds no module (*.safetensors): make one with `skipsearch train adapted --out {folder}`")
    yield from found


def _opened(path: Path) -> BufferedReader:
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ModuleError(f"{path}: cannot be read: {error.strerror or error}") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
        os.close(handle)
        what = (f"has {found.st_size / 2**30:.1f} GiB, and no module may have more than {MOST_BYTES / 2**30:.0f}"
                if stat.S_ISREG(found.st_mode) else "is a folder, device or pipe, where a file should be")
        raise ModuleError(f"{path}: this {what}; {WAY_OUT}")
    return os.fdopen(handle, "rb")


def _entries(file: BinaryIO, size: int, name: str) -> dict[str, Any]:
    """The header's JSON, whose tensors are floats and fill the file to its end. Raises: ModuleError."""
    start = file.read(8)
    if start == b"version ":
        raise ModuleError(f"{name}: this is a Git LFS pointer and not the module: run `git lfs pull` where it came from")
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MOST_HEADER):
        if start[:2] == b"PK" or start[:1] == b"\x80":   # asked only here: a header's length may begin with the same bytes
            raise ModuleError(f"{name}: this is a pickle, which can run code when it is opened, so it is not; modules are safetensors "
                              "files")
        raise ModuleError(f"{name}: this is no safetensors file, or it is cut short ({size} bytes); {WAY_OUT}")
    try:
        entries = json.loads(file.read(length))
        ends = [8 + length + _end(entry) for key, entry in entries.items() if key != "__metadata__"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModuleError(f"{name}: its header is damaged, or holds what no module has; {WAY_OUT}") from None
    if len(ends) > MOST_TENSORS:
        raise ModuleError(f"{name}: it announces {len(ends)} tensors, and no module has more than {MOST_TENSORS}")
    if max(ends, default=0) != size:
        raise ModuleError(f"{name}: it has {size} bytes and its header announces {max(ends, default=0)}, so it is cut short or damaged; "
                          f"{WAY_OUT}")
    return dict(entries)


def _end(entry: dict[str, Any]) -> int:
    """Where a tensor's bytes end. Raises: ValueError, KeyError or TypeError for an entry that describes no tensor of floats."""
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**40 for n in (*shape, start, end)):
        raise ValueError
    if prod(shape) * WIDTHS[entry["dtype"]] != end - start:
        raise ValueError
    return int(end)


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"[:200]
    return type(error).__name__
