"""Read GGUF files: the header, with a bound on everything, and the tensors by mapping.

Nothing in a file is trusted: counts, lengths, offsets and names are checked before they are used.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from skipsearch.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # keys, and tensors
MAX_ARRAY = 1 << 22  # elements of an array
MAX_STRING_BYTES = 1 << 24
MAX_HEADER_BYTES = 1 << 28
MAX_DIMENSIONS = 4
NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,127}")
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
COMPUTED_TENSOR = re.compile(r"blk\.\d+\.(rope_freqs|attn_rot_embd)\.weight")  # of old files
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
FLOAT_FORMATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class GGUFError(ModelError):
    """A GGUF file breaks a rule of its format."""


@dataclass(frozen=True)
class GGUFMatrix:
    """A matrix in a file, as a `StoredMatrix`."""

    name: str
    format: str  # such as q4_1 or bf16
    shape: tuple[int, int]  # (out, in)
    data: Bytes  # [out, row bytes]
    row_order: Tensor | None = None  # the row of `data` for each output; None: the same
    column_order: Tensor | None = None  # the same of inputs, for engines that unpack

    def take_rows(self, first: int, count: int) -> GGUFMatrix:
        """Return a part of the rows, of a matrix in the order of the file."""
        data = self.data[first : first + count]
        return replace(self, shape=(count, self.shape[1]), data=data)

    def row_addresses(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the address of each output's bytes, valid as long as `data`."""
        addresses = self.data.ctypes.data + np.arange(self.shape[0]) * self.data.shape[1]
        return addresses if self.row_order is None else addresses[self.row_order.numpy()]

    def dequantize_rows(self, rows: Tensor | slice) -> Tensor:
        """Return rows of the weight, [rows, in] in float32."""
        if self.row_order is not None:
            rows = self.row_order[rows]
        data = np.ascontiguousarray(self.data[rows if isinstance(rows, slice) else rows.numpy()])
        numbers = to_float32(data, self.format, (len(data), self.shape[1]))
        return numbers if self.column_order is None else numbers[:, self.column_order]


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor is in a file."""

    name: str
    format: str
    shape: tuple[int, ...]  # the slowest dimension first, as in torch
    data: Bytes  # mapped from the file


@dataclass
class GGUFFile:
    """What a file, or all files of a split one, hold."""

    paths: list[Path]
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GGUFTensor] = field(default_factory=dict)
    read_names: set[str] = field(default_factory=set)  # tensors that a model has taken

    @property
    def name(self) -> str:
        return self.paths[0].name

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata. Raises: GGUFError if it has another type."""
        value = self.metadata.get(key, default)
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise GGUFError(f"{self.name}: {key} is {str(value)[:40]!r}, which has the wrong type")
        return value

    def require_int(self, key: str, low: int = 1, high: int = 1 << 31) -> int:
        """Return a whole number between two bounds. Raises: GGUFError."""
        value = self.get(key, int)
        if value is None or not low <= value <= high:
            state = "is missing" if value is None else f"is {value}"
            raise GGUFError(f"{self.name}: {key} {state}; it has to be {low} to {high}")
        return int(value)

    def require_float(self, key: str, default: float | None, low: float, high: float) -> float:
        """Return a number between two bounds. default: None if the key is needed.

        Raises: GGUFError.
        """
        value = self.get(key, float, default)
        if value is None or not low <= value <= high:  # NaN is not between them
            state = "is missing" if value is None else f"is {value:g}"
            raise GGUFError(f"{self.name}: {key} {state}; it has to be {low:g} to {high:g}")
        return float(value)

    def require_read(self, n_layers: int) -> None:
        """Check that a model has taken every tensor: one that it lacks would change its text.

        Draft heads, which come after the layers of the model, are no part of it.
        Raises: GGUFError.
        """
        heads = self.metadata.get(f"{self.metadata['general.architecture']}.nextn_predict_layers")
        of_heads = tuple(f"blk.{n_layers + i}." for i in range(heads or 0))
        for name in self.tensors:
            is_known = name in self.read_names or COMPUTED_TENSOR.fullmatch(name)
            if not is_known and not name.startswith(of_heads):
                raise GGUFError(
                    f"{self.name} holds the tensor {name}, which is no part of the model that its "
                    "metadata describe: take another file of the model, or its folder"
                )

    def matrix(self, name: str, shape: tuple[int, int]) -> GGUFMatrix:
        """Return a matrix. Raises: GGUFError if it is missing or has another shape."""
        tensor = self._require(name, shape)
        return GGUFMatrix(name, tensor.format, shape, tensor.data.reshape(shape[0], -1))

    def stacked_matrix(self, name: str, shape: tuple[int, int, int]) -> GGUFMatrix:
        """Return matrices [n, out, in] as one matrix [n · out, in]. Raises: as `matrix`."""
        tensor, rows = self._require(name, shape), shape[0] * shape[1]
        return GGUFMatrix(name, tensor.format, (rows, shape[2]), tensor.data.reshape(rows, -1))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in float32. The file may lack sizes of 1, and fold a vector.

        Raises: GGUFError, as `matrix`.
        """
        stored = self.tensors.get(name)
        is_vector = len(_without_ones(shape)) == 1
        if stored is not None and (
            _without_ones(stored.shape) == _without_ones(shape)
            or (is_vector and prod(stored.shape) == prod(shape))
        ):
            self._require(name, stored.shape)
            return to_float32(np.array(stored.data), stored.format, shape)
        raise self._no_such_tensor(name, shape)

    def _require(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            raise self._no_such_tensor(name, shape)
        if not can_dequantize(tensor.format):
            raise GGUFError(
                f"{self.name}: the tensor {name} is in the format {tensor.format}, which is not "
                "read: take the model's file in another format"
            )
        self.read_names.add(name)
        return tensor

    def _no_such_tensor(self, name: str, shape: tuple[int, ...]) -> GGUFError:
        if name not in self.tensors:
            return GGUFError(f"{self.name} has no tensor {name}; download the file again")
        return GGUFError(
            f"{self.name}: the tensor {name} is {list(self.tensors[name].shape)}, and its model "
            f"needs {list(shape)}; download the file again"
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def to_float32(data: Bytes, number_format: str, shape: tuple[int, ...]) -> Tensor:
    """Return bytes of a file as numbers in float32."""
    if number_format in FLOAT_FORMATS:
        return (
            torch.from_numpy(data).flatten().view(FLOAT_FORMATS[number_format]).float().view(shape)
        )
    import gguf

    kind = gguf.GGMLQuantizationType[number_format.upper()]
    with np.errstate(all="ignore"):  # the logits show whether scales are no numbers
        return torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(shape))


@cache
def can_dequantize(number_format: str) -> bool:
    """Return whether `to_float32` takes a format, as it does not take integers."""
    import gguf

    kind = gguf.GGMLQuantizationType[number_format.upper()]
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        to_float32(np.zeros((1, n_bytes), np.uint8), number_format, (block,))
    except NotImplementedError:
        return False
    return True


def has_magic(path: Path) -> bool:
    """Return whether a file begins as GGUF files do. Raises: OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def list_parts(path: Path) -> list[Path]:
    """Return the files of a split model by the name of one, which may be missing; else the file."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    prefix, _, count = match.groups()
    return [path.parent / f"{prefix}-{i:05}-of-{count}.gguf" for i in range(1, int(count) + 1)]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a file, and of the other files of a split one.

    Raises: GGUFError for a file that breaks a rule, or lacks its other parts.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    metadata, tensors = _read_one(path)
    count = metadata.get("split.count", 0)
    if not count:
        return GGUFFile([path], metadata, tensors)
    if match is None or not isinstance(count, int) or int(match[3]) != count:
        raise GGUFError(
            f"{path.name} is a part of a split model, and is not named PREFIX-00001-of-0000N.gguf: "
            "give it the name that it was published with"
        )
    paths = list_parts(path)
    whole = GGUFFile(paths)
    for i, part in enumerate(paths):
        if not part.is_file():
            raise GGUFError(f"{path.name} is one of {count} parts, and {part.name} is missing")
        metadata, tensors = _read_one(part)
        if metadata.get("split.no") != i or tensors.keys() & whole.tensors.keys():
            raise GGUFError(f"{part.name} is not part {i + 1} of {count}: download it again")
        whole.metadata = whole.metadata or metadata
        whole.tensors |= tensors
    return whole


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with path.open("rb") as file:
            header = _HeaderReader(file, path)
            metadata = header.read_metadata()
            places = header.read_places()
            alignment = metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment % 8:
                raise GGUFError(f"{path.name}: general.alignment is {str(alignment)[:20]}")
            start = -(-file.tell() // alignment) * alignment
        data = np.memmap(path, dtype=np.uint8, mode="c")
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror}") from None
    return metadata, _locate_tensors(path, places, data, start, alignment)


@dataclass(frozen=True)
class _Place:
    name: str
    dimensions: tuple[int, ...]  # the fastest first, as in the file
    type_code: int
    offset: int


class _HeaderReader:
    """A reader of the header, which raises GGUFError for what breaks a rule."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.name = file, path.name
        self.n_read = len(MAGIC)  # bytes
        if file.read(len(MAGIC)) != MAGIC:
            raise GGUFError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        version = self.read_scalar("I")
        if version not in VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version} of GGUF"
            raise GGUFError(f"{self.name} is {kind}; versions 2 and 3 in little-endian are read")
        self.n_tensors, self.n_keys = self.read_scalar("Q"), self.read_scalar("Q")
        for count, noun in ((self.n_tensors, "tensors"), (self.n_keys, "keys")):
            if count > MAX_ENTRIES:
                self.fail(f"it claims {count} {noun}, and at most {MAX_ENTRIES} are read")

    def fail(self, reason: str) -> None:
        raise GGUFError(f"{self.name} is not a sound GGUF file: {reason}")

    def read_bytes(self, count: int) -> bytes:
        self.n_read += count
        if self.n_read > MAX_HEADER_BYTES:
            self.fail(f"its header is longer than {MAX_HEADER_BYTES} bytes")
        data = self.file.read(count)
        if len(data) != count:
            self.fail("it ends within its header; download it again")
        return data

    def read_scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.read_bytes(struct.calcsize(f"<{code}")))[0]

    def read_string(self) -> str:
        length = int.from_bytes(self.read_bytes(8), "little")  # a header may have 300,000 texts
        if length > MAX_STRING_BYTES:
            self.fail(f"a text of {length} bytes is longer than {MAX_STRING_BYTES}")
        return self.read_bytes(length).decode("utf-8", "replace")

    def read_name(self, noun: str) -> str:
        name = self.read_string()
        if not NAME.fullmatch(name):
            self.fail(f"the name of a {noun} is {name[:40]!r}")
        return name

    def read_value(self, type_code: int) -> Any:
        if type_code in SCALARS:
            return self.read_scalar(SCALARS[type_code])
        if type_code == STRING:
            return self.read_string()
        if type_code != ARRAY:
            self.fail(f"it has a value of type {type_code}, which GGUF does not have")
        element_type, count = self.read_scalar("I"), self.read_scalar("Q")
        if count > MAX_ARRAY:
            self.fail(f"an array of {count} elements is longer than {MAX_ARRAY}")
        if element_type == STRING:
            return [self.read_string() for _ in range(count)]
        if element_type not in SCALARS:
            self.fail(f"an array has elements of type {element_type}")
        code = SCALARS[element_type]
        data = self.read_bytes(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", data))

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self.n_keys):
            key = self.read_name("key")
            if key in metadata:
                self.fail(f"the key {key} appears twice")
            metadata[key] = self.read_value(self.read_scalar("I"))
        return metadata

    def read_places(self) -> list[_Place]:
        places = []
        for _ in range(self.n_tensors):
            name, n_dimensions = self.read_name("tensor"), self.read_scalar("I")
            if not 1 <= n_dimensions <= MAX_DIMENSIONS:
                self.fail(f"the tensor {name} has {n_dimensions} dimensions")
            dimensions = struct.unpack(f"<{n_dimensions}Q", self.read_bytes(8 * n_dimensions))
            if not all(1 <= size <= 1 << 31 for size in dimensions):
                self.fail(f"the tensor {name} has the sizes {list(dimensions)}")
            places.append(_Place(name, dimensions, self.read_scalar("I"), self.read_scalar("Q")))
        return places


def _locate_tensors(
    path: Path, places: list[_Place], data: Bytes, start: int, alignment: int
) -> dict[str, GGUFTensor]:
    """Return the tensors by name. Raises: GGUFError if they overlap or leave the file."""
    import gguf

    def fail(reason: str) -> GGUFError:
        return GGUFError(f"{path.name} is not a sound GGUF file: {reason}")

    sizes: Mapping[int, tuple[int, int]] = gguf.GGML_QUANT_SIZES
    tensors: dict[str, GGUFTensor] = {}
    end_of_previous, previous = 0, ""
    for place in sorted(places, key=lambda p: p.offset):
        if place.name in tensors:
            raise fail(f"the tensor {place.name} appears twice")
        if place.type_code not in sizes:
            raise fail(
                f"the tensor {place.name} has the type {place.type_code}, which is not known here"
            )
        kind = gguf.GGMLQuantizationType(place.type_code)
        block, block_bytes = sizes[kind]
        if place.dimensions[0] % block:
            raise fail(
                f"the tensor {place.name} has {place.dimensions[0]} inputs, and {kind.name} takes "
                f"{block} together"
            )
        n_bytes = prod(place.dimensions) // block * block_bytes
        if place.offset % alignment or place.offset < end_of_previous:
            reason = "overlaps " + previous if place.offset < end_of_previous else "is not aligned"
            raise fail(f"the tensor {place.name} {reason}")
        if start + place.offset + n_bytes > len(data):
            raise fail(f"the tensor {place.name} ends after the file; download it again")
        first = start + place.offset
        shape = tuple(reversed(place.dimensions))
        tensors[place.name] = GGUFTensor(
            place.name, kind.name.lower(), shape, data[first : first + n_bytes]
        )
        end_of_previous, previous = place.offset + n_bytes, place.name
    return tensors
