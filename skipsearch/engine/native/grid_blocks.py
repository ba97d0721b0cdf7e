"""Unpack blocks of IQ2 and IQ3 to numbers that panels can hold.

A file stores vectors of such a block as entries of a grid. The entries have few magnitudes, so with
their signs there are at most 16 numbers, and four bits say which: panels have the codebooks of
src/blocks.h. They take more bytes than the file, and less than a third of 16 bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipsearch.engine.native.block_formats import SUPER_GROUPS
from skipsearch.engine.native.structs import GROUP_SIZE
from skipsearch.models.fused.linear import StoredFusedLinear
from skipsearch.models.loading.gguf_file import to_float32
from skipsearch.models.stored_linear import StoredMatrix

SUPER_SIZE = SUPER_GROUPS * GROUP_SIZE  # inputs of a super-block
N_SCALES = 2 * SUPER_GROUPS  # of an unpacked super-block
UNPACKED_BYTES = 2 + N_SCALES + SUPER_SIZE  # `UnpackedSuperBlock` of src/blocks.h
Array = np.ndarray[Any, np.dtype[Any]]


def _scales_in_nibbles(blocks: Array) -> Array:
    """Return the scales [N, n] that the last bytes of a block have, four bits each."""
    scales: Array = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
    return scales


def _scales_in_words(words: Array, step: int = 1) -> Array:
    """Return the scales [N, n] in the upper four bits of every `step`-th word of [N, bytes]."""
    return words[:, 4 * step - 1 :: 4 * step] >> 4


@dataclass(frozen=True)
class GridFormat:
    """How a file stores scales of IQ2 or IQ3.

    A weight is half · factor · (2 · scale + 1) · number. The number is one of `magnitudes`, with
    either sign.
    """

    magnitudes: tuple[int, ...]
    factor: float
    read_scales: Callable[[Array], Array]  # from blocks [N, bytes] to [N, 8 or 16], of equal parts

    @cached_property
    def codes(self) -> Array:
        """The place in the codebook of a number plus 128."""
        numbers = np.array([*(-m for m in self.magnitudes[::-1]), *self.magnitudes])
        return np.searchsorted(numbers, np.arange(-128, 128)).astype(np.uint8)


_IQ2, _IQ3_XXS = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
GRID_FORMATS = {
    "iq2_xxs": GridFormat(_IQ2, 1 / 8, lambda b: _scales_in_words(b[:, 2:], step=2)),
    "iq2_xs": GridFormat(_IQ2, 1 / 8, lambda b: _scales_in_nibbles(b[:, 66:])),
    "iq2_s": GridFormat(_IQ2, 1 / 8, lambda b: _scales_in_nibbles(b[:, 74:])),
    "iq3_xxs": GridFormat(_IQ3_XXS, 1 / 4, lambda b: _scales_in_words(b[:, 66:])),
    "iq3_s": GridFormat(tuple(range(1, 16, 2)), 1.0, lambda b: _scales_in_nibbles(b[:, 106:])),
}


def has_exact_scales(matrix: StoredMatrix) -> bool:
    """Return whether halves can be the scales of a matrix in one of GRID_FORMATS."""
    import gguf

    _, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[matrix.format.upper()]]
    halves = matrix.data.reshape(-1, n_bytes)[:, :2].copy().view(np.float16)
    with np.errstate(all="ignore"):  # what is no number does not equal itself
        scales = halves.astype(np.float32) * np.float32(GRID_FORMATS[matrix.format].factor)
        return bool((scales.astype(np.float16).astype(np.float32) == scales).all())


def unpack_grid_blocks(rows: Array, name: str) -> Array:
    """Unpack rows of blocks, [N, row bytes], to [N, super-blocks · UNPACKED_BYTES].

    name: of the format, one of GRID_FORMATS.
    """
    import gguf

    grid = GRID_FORMATS[name]
    _, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    blocks = np.ascontiguousarray(rows).reshape(-1, n_bytes)
    scales = 2 * grid.read_scales(blocks) + 1
    scales = np.repeat(scales, N_SCALES // scales.shape[1], axis=1)  # [blocks, N_SCALES]
    weights = to_float32(blocks, name, (len(blocks), N_SCALES, -1)).numpy()
    # The numbers of a block of zeros do not matter, and the logits show scales that are no numbers.
    with np.errstate(all="ignore"):
        halves = blocks[:, :2].copy().view(np.float16).astype(np.float32) * np.float32(grid.factor)
        numbers = np.nan_to_num(np.rint(weights / (halves * scales)[..., None]), posinf=0, neginf=0)
    unpacked = np.empty((len(blocks), UNPACKED_BYTES), dtype=np.uint8)
    unpacked[:, :2] = halves.astype(np.float16).view(np.uint8)
    unpacked[:, 2 : 2 + N_SCALES] = scales
    codes = grid.codes[numbers.astype(np.int64).clip(-128, 127) + 128]
    unpacked[:, 2 + N_SCALES :] = codes.reshape(len(blocks), -1)
    return unpacked.reshape(len(rows), -1)


def unpack_grid_rows(matrix: StoredFusedLinear, rows: Tensor) -> Tensor:
    """Unpack rows [N] of a matrix whose parts are in GRID_FORMATS, [N, unpacked bytes]."""
    addresses, parts = matrix.row_addresses()[rows.numpy()], matrix.row_parts()[rows.numpy()]
    n_supers = matrix.shape[1] // SUPER_SIZE
    unpacked = np.empty((len(rows), n_supers * UNPACKED_BYTES), dtype=np.uint8)
    for part in np.unique(parts):
        stored, of_part = matrix.parts[part], parts == part
        row_bytes = stored.data.shape[1]
        read = b"".join(ctypes.string_at(int(a), row_bytes) for a in addresses[of_part])
        raw = np.frombuffer(read, dtype=np.uint8).reshape(-1, row_bytes)
        unpacked[of_part] = unpack_grid_blocks(raw, stored.format)
    return torch.from_numpy(unpacked)
