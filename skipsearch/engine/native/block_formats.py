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
        number_bytes = GROUP_SIZE * PANEL_ROWS * self.bits // 8
        scale_bytes = (self.n_scales if self.has_super_blocks else 2) * (1 + self.has_min)
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
        BlockFormat("q2_k", 14, 2, has_min=True, has_super_blocks=True, n_scales=2),
        BlockFormat("iq3_s", 15, 4, zero=128, has_super_blocks=True, has_codebook=True),
        BlockFormat("iq3_xxs", 16, 4, zero=128, has_super_blocks=True, has_codebook=True),
        BlockFormat("iq2_s", 17, 4, zero=128, has_super_blocks=True, n_scales=2, has_codebook=True),
    )
}
_PANELS_OF = {"iq2_xs": "iq2_s", "iq2_xxs": "iq2_s"}  # formats of files with the same numbers


def find_block_format(file_format: str) -> BlockFormat | None:
    """Return the format in which panels hold the numbers of a file's format; None: no panel can."""
    return BLOCK_FORMATS.get(_PANELS_OF.get(file_format, file_format))
