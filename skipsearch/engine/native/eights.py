"""Weights of 8 bits in panels: whole numbers up to 127, and a scale in bfloat16 for 32 inputs of an output. Activations keep their dtype.

Numbers and scales are those of GGUF's Q8_0, whose scales are float16. The product of a number and a scale has 15 bits, which float32 holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import abi
from skipsearch.engine.native.abi import BLOCK_BYTES, PANEL, SCALE_BYTES, SCALED
from skipsearch.engine.native.library import Library
from skipsearch.engine.native.panels import LINE, Panels, Room

MOST = 127             # of a number, either sign
AT_ONCE = 4 << 20      # weights that are quantised together, so that little memory is needed beside them


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [out, in] -> (int8 [out, in], scales [out, blocks] in bfloat16). A scale is the largest of its block over 127."""
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % SCALED)).unflatten(1, (-1, SCALED))
    scales = (blocks.abs().amax(dim=-1) / MOST).bfloat16()
    known = torch.where(scales == 0, 1, scales.float())
    numbers = (blocks / known[..., None]).round_().clamp_(-MOST, MOST).to(torch.int8)
    return numbers.flatten(1)[:, :weight.shape[1]], scales


def dequantised(numbers: Tensor, scales: Tensor) -> Tensor:
    """What `quantised` gave, as [out, in] in float32, exactly."""
    return numbers.float() * scales.float().repeat_interleave(SCALED, dim=1)[:, :numbers.shape[1]]


@dataclass(frozen=True, slots=True)
class Eights(Panels):
    """`Panels` of 8 bits. weight: bytes [panels, n]: block after block, as src/abi.h has it. dtype: of activations."""

    dtype: torch.dtype

    @property
    def kind(self) -> int:
        return abi.EIGHT_BITS

    def dense(self) -> Tensor:
        out, width = self.shape
        found = torch.empty(self.halves, len(self.weight) // self.halves, PANEL, width, dtype=self.dtype)
        for at, numbers, scales in _blocks(self.weight, width):
            values = numbers.float() * scales.float()[:, :, None]                    # [panels, blocks, inputs, PANEL]
            turned = values.flatten(1, 2).transpose(1, 2).unflatten(0, (-1, self.halves)).transpose(0, 1)
            found[..., at:at + turned.shape[-1]] = turned[..., :width - at]
        return found.flatten(1, 2)[:, :out // self.halves].reshape(out, width)

    def rows(self, which: Tensor) -> Tensor:
        panels, places = which // PANEL, which % PANEL
        pieces = [(numbers[panels, :, :, places].float() * scales[panels, :, places].float()[..., None]).flatten(-2)
                  for _, numbers, scales in _blocks(self.weight, self.shape[1])]
        return torch.cat(pieces, dim=-1)[..., :self.shape[1]].to(self.dtype)


def eights_room(shape: tuple[int, int], halves: int) -> int:
    """Bytes of a matrix (out, in), up to the next cache line."""
    panels, size = _size(shape, halves)
    return -(-panels * size // LINE) * LINE


def in_eights(weight: Tensor, bias: Tensor | None, halves: int, library: Library, room: Room | None = None) -> Eights:
    """As `in_panels`."""
    out, width = weight.shape
    size = _size((out, width), halves)
    panels = torch.empty(size, dtype=torch.uint8) if room is None else room.take(size, torch.uint8)
    rows, step = weight.reshape(halves, out // halves, width), max(1, AT_ONCE // (halves * PANEL * width)) * PANEL
    for at in range(0, out // halves, step):
        some = rows[:, at:at + step]
        numbers, scales = quantised(F.pad(some, (0, 0, 0, -some.shape[1] % PANEL)).flatten(0, 1))

        def turned(x: Tensor) -> Tensor:
            """[halves · rows, n] -> [panels, n, PANEL]"""
            return x.unflatten(0, (halves, -1, PANEL)).transpose(0, 1).flatten(0, 1).transpose(1, 2)

        numbers, scales = turned(F.pad(numbers, (0, width % 2))), turned(scales)
        first = at // PANEL * halves
        for start, into, its in _blocks(panels[first:first + len(numbers)], width):
            count = into.shape[1] * into.shape[2]
            into.copy_(numbers[:, start:start + count].unflatten(1, into.shape[1:3]))
            its.copy_(scales[:, start // SCALED:start // SCALED + its.shape[1]])
    return Eights(panels, bias, (out, width), halves, library, weight.dtype)


def _size(shape: tuple[int, int], halves: int) -> tuple[int, int]:
    """(panels, bytes of each)"""
    blocks = -(-shape[1] // SCALED)
    return halves * -(-shape[0] // halves // PANEL), blocks * SCALE_BYTES + (shape[1] + shape[1] % 2) * PANEL


def _blocks(panels: Tensor, width: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(the first input, numbers [panels, blocks, inputs, PANEL], scales [panels, blocks, PANEL]) of the whole blocks, and of a shorter last
    one. They share memory with the panels."""
    whole = width // SCALED * BLOCK_BYTES
    for start, part, count in ((0, panels[:, :whole], BLOCK_BYTES), (width // SCALED * SCALED, panels[:, whole:], panels.shape[1] - whole)):
        if part.shape[1]:
            blocks = part.unflatten(1, (-1, count))
            scales, numbers = blocks[..., :SCALE_BYTES], blocks[..., SCALE_BYTES:]
            yield start, numbers.view(torch.int8).unflatten(2, (-1, PANEL)), scales.view(torch.bfloat16)
