"""Weights of 4 to 8 bits in blocks of 32 inputs. src/blocks.h describes the formats."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import structs
from skipsearch.engine.native.block_formats import BLOCK_FORMATS
from skipsearch.engine.native.build import NativeLibrary, load_or_build
from skipsearch.engine.native.structs import GROUP_SIZE

UNPACKED_BYTES = 2 + GROUP_SIZE  # a float16 scale, then a number a byte
CHUNK_WEIGHTS = 4 << 20  # weights that are quantised at once, which bounds the extra memory


FORMAT_BY_CODE = {block_format.code: block_format for block_format in BLOCK_FORMATS.values()}
FORMAT_OF_BITS = {bits: BLOCK_FORMATS[f"q{bits}_0"] for bits in (8, 6, 5, 4)}


def quantize(weight: Tensor, bits: int, library: NativeLibrary | None = None) -> Tensor:
    """Round weights [out, in] to blocks, bytes [out, groups, UNPACKED_BYTES] on the CPU.

    With 8 bits, the scale of a block is its largest magnitude over 127. With fewer bits, a first
    scale makes the weight of the largest magnitude the lowest number. A few scales close to it are
    tried, and the scale with the least squared error is taken.
    bits: a key of FORMAT_OF_BITS. library: None: load it, or build it.
    Raises: ModelError if the library cannot be built.
    """
    groups = F.pad(weight.cpu().float(), (0, -weight.shape[1] % GROUP_SIZE)).contiguous()
    shape = (len(groups), groups.shape[1] // GROUP_SIZE, UNPACKED_BYTES)
    blocks = torch.empty(shape, dtype=torch.uint8)
    (library or load_or_build()).call(
        "quantize_blocks",
        structs.QuantizeArgs(
            groups.data_ptr(), groups.numel() // GROUP_SIZE, bits, blocks.data_ptr()
        ),
    )
    return blocks


def split_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (numbers [out, groups, 32], scales [out, groups] in float16) of blocks."""
    return blocks[..., 2:], blocks[..., :2].contiguous().view(torch.float16)[..., 0]


def dequantize(blocks: Tensor, bits: int) -> Tensor:
    """Return the exact weights of blocks, [out, groups, 32] in float32."""
    numbers, scales = split_blocks(blocks)
    return (numbers.float() - FORMAT_OF_BITS[bits].zero) * scales.float()[..., None]


def round_weight(weight: Tensor, bits: int) -> Tensor:
    """Return a matrix [out, in] after rounding to `bits` bits, in its own dtype."""
    rows = max(1, CHUNK_WEIGHTS // weight.shape[1])
    parts = [
        dequantize(quantize(part, bits), bits).flatten(1)[:, : weight.shape[1]].to(weight)
        for part in weight.split(rows)
    ]
    return torch.cat(parts)
