"""Read the header of a safetensors file, without trusting anything in it.

A safetensors file consists of eight bytes with the length of the header, the header as JSON, and
the tensors. The header gives dtype, shape and byte range of each tensor."""

from __future__ import annotations

import json
from math import prod
from typing import Any, BinaryIO, Literal

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Any other dtype takes one byte or less.
OTHER_BYTES = {"C64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
METADATA_KEY = "__metadata__"
MAX_INTEGER = 2**48  # of a shape or an offset: products of larger numbers would take long


class HeaderError(Exception):
    """An error for a header that cannot be read. The caller writes the message for the user."""

    def __init__(
        self, problem: Literal["lfs pointer", "too short", "damaged", "wrong size"], detail: Any
    ):
        super().__init__(problem)
        self.problem = problem
        self.detail = detail  # too short: the first bytes; wrong size: the announced size in bytes


def read_safetensors_header(file: BinaryIO, size: int, max_header_bytes: int) -> dict[str, Any]:
    """Return the header of a file of `size` bytes: an entry for each tensor, and the metadata.

    Raises: HeaderError, also if the tensors do not fill the file to its end.
    """
    start = file.read(8)
    if start == b"version ":
        raise HeaderError("lfs pointer", start)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, max_header_bytes):
        raise HeaderError("too short", start)
    try:
        header = dict(json.loads(file.read(length)))
        data_ends = [_data_end(entry) for key, entry in header.items() if key != METADATA_KEY]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise HeaderError("damaged", None) from None
    announced = 8 + length + max(data_ends, default=0)
    if announced != size:
        raise HeaderError("wrong size", announced)
    return header


def _data_end(entry: dict[str, Any]) -> int:
    """Return where a tensor's bytes end. Raises: ValueError, KeyError or TypeError if the entry
    describes no tensor.
    """
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise TypeError
    if not all(type(n) is int and 0 <= n < MAX_INTEGER for n in (*shape, start, end)):
        raise ValueError
    width = FLOAT_BYTES.get(dtype) or OTHER_BYTES.get(dtype)
    if start > end or (width is not None and prod(shape) * width != end - start):
        raise ValueError
    return int(end)
