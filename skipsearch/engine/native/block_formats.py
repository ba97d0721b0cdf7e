"""The formats of panels in blocks, as BLOCK_FORMATS of src/blocks.h describes them."""

from __future__ import annotations

from dataclasses import dataclass

from skipsearch.engine.native.structs import GROUP_SIZE, PANEL_ROWS

SUPER_GROUPS = 8  # blocks of a super-block


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
    has_codebook: bool = False  # bits stand for the numbers of a table in src/blocks.h

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
        BlockFormat("q3_k", 10, 4, zero=4, has_super_blocks=True, n_scales=2),
        BlockFormat("iq4_nl", 11, 4, zero=128, has_codebook=True),
        BlockFormat("iq4_xs", 12, 4, zero=128, has_super_blocks=True, has_codebook=True),
        BlockFormat("mxfp4", 13, 4, zero=128, has_codebook=True),
    )
}
