"""Int8 weights in panels: integers up to ±127, and one bfloat16 scale for 32 inputs of an output.

Activations keep their dtype. Integers and scales are those of GGUF's Q8_0, whose scales are
float16. The product of an integer and a scale has 15 bits, which float32 holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.engine.native.panels import CACHE_LINE_BYTES, HugePageArena, PanelLinear
from skipsearch.engine.native.structs import GROUP_BYTES, GROUP_SIZE, PANEL_ROWS, SCALE_BYTES

INT8_MAX = 127  # magnitude
CHUNK_WEIGHTS = 4 << 20  # weights that are quantised at once, which bounds the extra memory


def quantize_q8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights [out, in] to (int8 [out, in], scales [out, groups] in bfloat16).

    A scale is the largest magnitude of its group over 127.
    """
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP_SIZE)).unflatten(
        1, (-1, GROUP_SIZE)
    )
    scales = (groups.abs().amax(dim=-1) / INT8_MAX).bfloat16()
    divisors = torch.where(scales == 0, 1, scales.float())
    numbers = (groups / divisors[..., None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return numbers.flatten(1)[:, : weight.shape[1]], scales


def dequantize_q8(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the weights that `quantize_q8` encoded, [out, in] in float32, exactly."""
    return (
        numbers.float() * scales.float().repeat_interleave(GROUP_SIZE, dim=1)[:, : numbers.shape[1]]
    )


@dataclass(frozen=True, slots=True)
class Int8Panels(PanelLinear):
    """A `PanelLinear` of int8. weight: bytes [panels, n], group after group, as in src/abi.h."""

    dtype: torch.dtype  # of activations

    @property
    def dtype_code(self) -> int:
        return structs.INT8

    def to_dense(self) -> Tensor:
        n_outputs, n_inputs = self.shape
        dense = torch.empty(
            self.interleave,
            len(self.weight) // self.interleave,
            PANEL_ROWS,
            n_inputs,
            dtype=self.dtype,
        )
        for first_input, numbers, scales in _iter_groups(self.weight, n_inputs):
            values = (
                numbers.float() * scales.float()[:, :, None]
            )  # [panels, groups, inputs, PANEL_ROWS]
            rows = (
                values.flatten(1, 2)
                .transpose(1, 2)
                .unflatten(0, (-1, self.interleave))
                .transpose(0, 1)
            )
            dense[..., first_input : first_input + rows.shape[-1]] = rows[
                ..., : n_inputs - first_input
            ]
        return dense.flatten(1, 2)[:, : n_outputs // self.interleave].reshape(n_outputs, n_inputs)

    def read_rows(self, row_indices: Tensor) -> Tensor:
        panels, offsets = row_indices // PANEL_ROWS, row_indices % PANEL_ROWS
        pieces = [
            (
                numbers[panels, :, :, offsets].float()
                * scales[panels, :, offsets].float()[..., None]
            ).flatten(-2)
            for _, numbers, scales in _iter_groups(self.weight, self.shape[1])
        ]
        return torch.cat(pieces, dim=-1)[..., : self.shape[1]].to(self.dtype)


def int8_panels_nbytes(shape: tuple[int, int], interleave: int) -> int:
    """Return the bytes of a matrix (out, in), up to the next cache line."""
    panels, size = _panels_size(shape, interleave)
    return -(-panels * size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def pack_int8_panels(
    weight: Tensor,
    bias: Tensor | None,
    interleave: int,
    library: NativeLibrary,
    arena: HugePageArena | None = None,
) -> Int8Panels:
    """Quantise a weight [out, in] and store it in panels, as `pack_panels` does."""
    n_outputs, n_inputs = weight.shape
    size = _panels_size((n_outputs, n_inputs), interleave)
    panels = (
        torch.empty(size, dtype=torch.uint8) if arena is None else arena.allocate(size, torch.uint8)
    )
    rows = weight.reshape(interleave, n_outputs // interleave, n_inputs)
    n_chunk_rows = max(1, CHUNK_WEIGHTS // (interleave * PANEL_ROWS * n_inputs)) * PANEL_ROWS
    for offset in range(0, n_outputs // interleave, n_chunk_rows):
        chunk = rows[:, offset : offset + n_chunk_rows]
        numbers, scales = quantize_q8(
            F.pad(chunk, (0, 0, 0, -chunk.shape[1] % PANEL_ROWS)).flatten(0, 1)
        )

        def to_panels(x: Tensor) -> Tensor:
            """Return [interleave · rows, n] as [panels, n, PANEL_ROWS]."""
            return (
                x.unflatten(0, (interleave, -1, PANEL_ROWS))
                .transpose(0, 1)
                .flatten(0, 1)
                .transpose(1, 2)
            )

        numbers, scales = to_panels(F.pad(numbers, (0, n_inputs % 2))), to_panels(scales)
        first_panel = offset // PANEL_ROWS * interleave
        for first_input, group_numbers, group_scales in _iter_groups(
            panels[first_panel : first_panel + len(numbers)], n_inputs
        ):
            count = group_numbers.shape[1] * group_numbers.shape[2]
            group_numbers.copy_(
                numbers[:, first_input : first_input + count].unflatten(1, group_numbers.shape[1:3])
            )
            group_scales.copy_(
                scales[
                    :, first_input // GROUP_SIZE : first_input // GROUP_SIZE + group_scales.shape[1]
                ]
            )
    return Int8Panels(panels, bias, (n_outputs, n_inputs), interleave, library, weight.dtype)


def _panels_size(shape: tuple[int, int], interleave: int) -> tuple[int, int]:
    """Return (panels, bytes of each)."""
    n_groups = -(-shape[1] // GROUP_SIZE)
    return interleave * -(-shape[0] // interleave // PANEL_ROWS), n_groups * SCALE_BYTES + (
        shape[1] + shape[1] % 2
    ) * PANEL_ROWS


def _iter_groups(panels: Tensor, width: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first input, integers [panels, groups, inputs, PANEL_ROWS], scales [panels, groups,
    PANEL_ROWS]): the whole groups, then a shorter last one.

    They share memory with the panels.
    """
    whole_bytes = width // GROUP_SIZE * GROUP_BYTES
    for first_input, group_panels, group_bytes in (
        (0, panels[:, :whole_bytes], GROUP_BYTES),
        (width // GROUP_SIZE * GROUP_SIZE, panels[:, whole_bytes:], panels.shape[1] - whole_bytes),
    ):
        if group_panels.shape[1]:
            groups = group_panels.unflatten(1, (-1, group_bytes))
            scales, numbers = groups[..., :SCALE_BYTES], groups[..., SCALE_BYTES:]
            yield (
                first_input,
                numbers.view(torch.int8).unflatten(2, (-1, PANEL_ROWS)),
                scales.view(torch.bfloat16),
            )
