"""Weight matrices in the layout that the native kernels read, one copy each: panels of output rows that lie side by side."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import abi
from skipsearch.engine.native.abi import PANEL
from skipsearch.engine.native.library import Library

HUGE, LINE = 2 << 20, 64   # bytes of a large page and of a cache line


@dataclass(frozen=True, slots=True)
class Panels:
    """A `Linear`. weight: [panels, in / s, PANEL, s], s = 2 in bfloat16 and 1 otherwise, padded with zeros. shape: (out, in).

    halves: 2 where the first half of the outputs and the second one take turns, panel by panel, as gate and up do; else 1.
    """

    weight: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    halves: int
    library: Library

    @property
    def bytes(self) -> int:
        return self.weight.nbytes

    @property
    def matrix(self) -> abi.Matrix:
        """For the kernels, without the bias; valid as long as this object."""
        return abi.Matrix(self.weight.data_ptr(), None, len(self.weight) * PANEL if self.halves > 1 else self.shape[0], self.shape[1],
                          self.kind)

    @property
    def kind(self) -> int:
        return abi.AS_DTYPE

    @property
    def wide_bias(self) -> Tensor | None:
        """[panels · PANEL] in the order of the panels, float32 or better, as the kernels take it."""
        if self.bias is None:
            return None
        wide = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32)).view(self.halves, -1)
        whole = F.pad(wide, (0, len(self.weight) // self.halves * PANEL - wide.shape[1]))
        return whole.view(self.halves, -1, PANEL).transpose(0, 1).flatten().contiguous()

    def dense(self) -> Tensor:
        """[out, in], a copy."""
        out, width = self.shape
        rows = self.weight.unflatten(0, (-1, self.halves)).transpose(0, 1).transpose(2, 3)   # [halves, panels, PANEL, in / s, s]
        return rows.flatten(3).flatten(1, 2)[:, :out // self.halves, :width].reshape(out, width)

    def rows(self, which: Tensor) -> Tensor:
        """[…] -> […, in], a copy of these rows of the weight, where `halves` is 1."""
        return self.weight[which // PANEL, :, which % PANEL].flatten(-2)[..., :self.shape[1]]

    def like(self, weight: Tensor, bias: Tensor | None) -> Panels:
        return in_panels(weight, bias, self.halves, self.library)

    def __call__(self, x: Tensor) -> Tensor:
        x, matrix, bias = x.contiguous(), self.matrix, self.wide_bias
        if bias is not None:
            matrix.bias = bias.data_ptr()
        y = x.new_empty(len(x), matrix.out)
        self.library.product(x.dtype, abi.Product(ctypes.pointer(matrix), x.data_ptr(), y.data_ptr(), len(x), torch.get_num_threads()))
        if self.halves == 1:
            return y
        halves = y.view(len(x), -1, self.halves, PANEL).transpose(1, 2).reshape(len(x), self.halves, -1)
        return halves[..., :self.shape[0] // self.halves].reshape(len(x), -1)

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self(x)


@dataclass(frozen=True, slots=True)
class TiedEmbedding:
    """The embedding of a model whose head's matrix it shares. scale: of each row, rounded to the dtype; 1 for none."""

    head: Panels
    scale: float

    @property
    def weight(self) -> Tensor:
        """The head's own."""
        return self.head.weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, H]."""
        rows = self.head.rows(tokens)
        return rows if self.scale == 1 else rows * self.scale


class Room:
    """Memory for all matrices of a model in pages as large as the system gives: a pass reads all of it, and each page costs a look-up."""

    def __init__(self, size: int):
        self._memory = mmap.mmap(-1, max(size + HUGE, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)   # which keeps the memory
        self._at = -self._bytes.data_ptr() % HUGE

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of memory that nobody else has, on a cache line."""
        size = math.prod(shape) * dtype.itemsize
        found = self._bytes[self._at:self._at + size].view(dtype).view(*shape)
        self._at += -(-size // LINE) * LINE
        return found


def room_for(shape: tuple[int, int], halves: int, dtype: torch.dtype) -> int:
    """Bytes of a matrix (out, in) in panels, up to the next cache line."""
    size = math.prod(_panels(shape, halves, dtype)) * dtype.itemsize
    return -(-size // LINE) * LINE


def in_panels(weight: Tensor, bias: Tensor | None, halves: int, library: Library, room: Room | None = None) -> Panels:
    """weight: [out, in]. The caller lets go of it, or there are two copies. room: where it goes; None for memory of its own."""
    out, width = weight.shape
    shape = _panels((out, width), halves, weight.dtype)
    rows = F.pad(weight.reshape(halves, out // halves, width), (0, -width % shape[-1], 0, -(out // halves) % PANEL))
    turns = rows.unflatten(2, (-1, shape[-1])).unflatten(1, (-1, PANEL)).transpose(2, 3).transpose(0, 1)
    panels = weight.new_empty(shape) if room is None else room.take(shape, weight.dtype)
    panels.view(turns.shape).copy_(turns)                       # [panels, halves, in / s, PANEL, s]
    return Panels(panels, bias, (out, width), halves, library)


def _panels(shape: tuple[int, int], halves: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """[panels, in / s, PANEL, s]"""
    together = 2 if dtype == torch.bfloat16 else 1
    return halves * -(-shape[0] // halves // PANEL), -(-shape[1] // together), PANEL, together
