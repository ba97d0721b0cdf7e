"""Weights of 4 to 8 bits in blocks of 32 inputs. src/blocks.h describes the formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary, load_or_build
from skipsearch.engine.native.structs import GROUP_SIZE, PANEL_ROWS

SUPER_GROUPS = 8  # blocks of a super-block
UNPACKED_BYTES = 2 + GROUP_SIZE  # a float16 scale, then a number a byte
CHUNK_WEIGHTS = 4 << 20  # weights that are quantised at once, which bounds the extra memory


@dataclass(frozen=True)
class BlockFormat:
    """A format in which panels store numbers of `bits` bits with their scales and minimums."""

    name: str  # of llama.cpp
    code: int  # PanelKind of src/abi.h
    bits: int
    zero: int = 0  # the number that stands for 0, in formats without a minimum
    has_min: bool = False
    has_super_blocks: bool = False
    n_scales: int = 1  # of a block

    def panel_nbytes(self, n_inputs: int) -> int:
        """Return the bytes of a panel."""
        groups = -(-n_inputs // GROUP_SIZE)
        extra_planes = 0 if self.bits == 8 else self.bits - 4
        number_bytes = GROUP_SIZE * PANEL_ROWS // (1 if self.bits == 8 else 2)
        number_bytes += extra_planes * 4 * PANEL_ROWS
        scale_bytes = (
            self.n_scales + self.has_min if self.has_super_blocks else 2 + 2 * self.has_min
        )
        header_bytes = 2 + 2 * self.has_min if self.has_super_blocks else 0
        return groups * (number_bytes + scale_bytes * PANEL_ROWS) + (
            -(-groups // SUPER_GROUPS) * header_bytes * PANEL_ROWS
        )


BLOCK_FORMATS = {
    block_format.name: block_format
    for block_format in (
        BlockFormat("q8_0", 1, 8, zero=128),
        BlockFormat("q4_0", 2, 4, zero=8),
        BlockFormat("q4_1", 3, 4, has_min=True),
        BlockFormat("q5_0", 4, 5, zero=16),
        BlockFormat("q5_1", 5, 5, has_min=True),
        BlockFormat("q6_0", 6, 6, zero=32),  # no file has it
        BlockFormat("q4_k", 7, 4, has_min=True, has_super_blocks=True),
        BlockFormat("q5_k", 8, 5, has_min=True, has_super_blocks=True),
        BlockFormat("q6_k", 9, 6, zero=32, has_super_blocks=True, n_scales=2),
    )
}
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
    (library or load_or_build()).quantize_blocks(
        structs.QuantizeArgs(
            groups.data_ptr(), groups.numel() // GROUP_SIZE, bits, blocks.data_ptr()
        )
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
