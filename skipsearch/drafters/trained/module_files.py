"""Find module files and read their headers, without trusting their content.

A module is a safetensors file. Its card is in the metadata of the header. An error is one sentence,
and no part of a file is ever executed. This file does not import torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from skipsearch.core.files import IrregularFileError, open_regular
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.trained.card import BLOCK_BYTES, BLOCK_VALUES, ModuleCard
from skipsearch.errors import ModuleError

MAX_FILE_BYTES = 4 * 2**30
MAX_HEADER_BYTES = 4 * 2**20  # safetensors reads 100 MB, which takes 20 s
MAX_TENSORS = 20_000
FLOATS = {"F64", "F32", "F16", "BF16"}
BYTES = "U8"  # of blocks
# The metadata have no other key, so that equal modules are equal files.
CARD_KEY = "skipsearch-module-1"
WAY_OUT = "get the file again from where it came, or train one: skipsearch train --help"


@dataclass(frozen=True)
class ModuleHeader:
    """The header of a module file."""

    card: ModuleCard
    shapes: dict[str, tuple[int, ...]]  # of the tensors, by name

    @property
    def n_parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def find_module_file(ref: ModuleRef, folders: Sequence[Path]) -> Path:
    """Return the first file in these folders that has the name and the hash of `ref`.

    Raises: ModuleError if there is no such file.
    """
    paths = [path for folder in folders if os.path.lexists(path := folder / ref.file)]
    if not paths:
        looked = " and ".join(map(str, folders)) or "no folder at all: give the one that holds it"
        raise ModuleError(f"the module {ref.file} is not there; it was looked for in {looked}")
    for path in paths:
        if hash_module_file(path) == ref.sha256:
            return path
    raise ModuleError(
        f"{paths[0]}: this is not the module that was measured (its hash is not "
        f"{ref.sha256[:12]}…); {WAY_OUT}"
    )


def hash_module_file(path: Path) -> str:
    """Return the SHA-256 of a module file. Raises: ModuleError if it cannot be a module."""
    with _open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_reference(path: Path, name: str) -> ModuleRef:
    """Return the reference by which a profile names this file.

    name: the path relative to the profile. Raises: ModuleError.
    """
    header = read_module_header(path)
    try:
        return ModuleRef(
            file=name, sha256=hash_module_file(path), parameters=max(1, header.n_parameters)
        )
    except ValidationError:
        raise ModuleError(
            f"{name!r} cannot be the name of a module in a profile: letters, digits and `._-/`, "
            "ending in "
            ".safetensors"
        ) from None


def read_module_header(path: Path, name: str | None = None) -> ModuleHeader:
    """Return a file's header, checked against its size.

    name: of the file, for errors, if `path` is a copy. Raises: ModuleError.
    """
    name = name or str(path)
    with _open_regular(path) as file:
        start = file.read(8)
    try:
        if int.from_bytes(start, "little") > MAX_HEADER_BYTES:
            raise SafetensorError
        with safe_open(path, framework="numpy") as stored:
            metadata, names = stored.metadata() or {}, stored.keys()
            if len(names) > MAX_TENSORS:
                raise ModuleError(
                    f"{name}: it announces {len(names)} tensors, and no module has more than "
                    f"{MAX_TENSORS}"
                )
            slices = {key: stored.get_slice(key) for key in names}
    except SafetensorError:  # its text may quote the file
        raise ModuleError(f"{name}: {_describe_problem(start)}") from None
    if CARD_KEY not in metadata:
        raise ModuleError(
            f"{name}: this is a safetensors file, but no module of skipsearch: its header has no "
            "card"
        )
    try:
        card = ModuleCard.model_validate_json(metadata[CARD_KEY])
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise ModuleError(
            f"{name}: its card cannot be read ({_first_error(error)}); {WAY_OUT}"
        ) from None
    shapes = dict[str, tuple[int, ...]]()
    for key, entry in slices.items():
        shape = _read_shape(card, entry.get_dtype(), tuple(entry.get_shape()))
        if shape is not None:
            shapes[key] = shape
    if not shapes or len(shapes) < len(slices):
        raise ModuleError(f"{name}: it holds what no module has, or no tensor; {WAY_OUT}")
    return ModuleHeader(card, shapes)


def _read_shape(
    card: ModuleCard, number_format: str, stored: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the shape of a tensor's values; None: no module has such a tensor."""
    if number_format in FLOATS:
        return stored
    if number_format != BYTES or card.blocks is None or len(stored) != 2:
        return None
    n_blocks, rest = divmod(stored[1], BLOCK_BYTES[card.blocks])
    return None if rest else (stored[0], n_blocks * BLOCK_VALUES)


def list_modules(folder: Path) -> Iterator[Path]:
    """Yield every *.safetensors file of a folder, in order of names.

    Raises: ModuleError if `folder` is not a folder or has no such file.
    """
    if not folder.is_dir():
        raise ModuleError(
            f"{folder} is not a folder: name the one that `skipsearch train … --out` made"
        )
    paths = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not paths:
        raise ModuleError(
            f"{folder} holds no module (*.safetensors): make one with `skipsearch train adapted "
            f"--out {folder}`"
        )
    yield from paths


def _open_regular(path: Path) -> BufferedReader:
    try:
        file = open_regular(path)
    except IrregularFileError:
        raise ModuleError(
            f"{path}: this is a folder, device or pipe, where a file should be; {WAY_OUT}"
        ) from None
    except OSError as error:
        raise ModuleError(f"{path}: cannot be read: {error.strerror or error}") from None
    size = os.fstat(file.fileno()).st_size
    if size > MAX_FILE_BYTES:
        file.close()
        raise ModuleError(
            f"{path}: this has {size / 2**30:.1f} GiB, and no module may have more than "
            f"{MAX_FILE_BYTES / 2**30:.0f}; {WAY_OUT}"
        )
    return file


def _describe_problem(start: bytes) -> str:
    """Return why a file that begins with `start` is no safetensors file."""
    if start == b"version ":
        return "this is a Git LFS pointer and not the module: run `git lfs pull` where it came from"
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return (
            "this is a pickle, which can run code when it is opened, so it is not; modules are "
            "safetensors files"
        )
    return f"this is no safetensors file, or it is cut short or damaged; {WAY_OUT}"


def _first_error(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
    return type(error).__name__
