"""Weight matrices as the native kernels read them: panels of neighbouring output rows."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.engine.native.structs import PANEL_ROWS

HUGE_PAGE_BYTES = 2 << 20
CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """A `Linear` whose weight is stored panel by panel, as src/abi.h describes it."""

    # [panels, in / s, PANEL_ROWS, s], s = 2 in bfloat16 and 1 otherwise, padded with zeros.
    weight: Tensor
    bias: Tensor | None  # [out]
    shape: tuple[int, int]  # (out, in), without padding
    # 2: panels of the first half of the outputs and of the second one alternate (gate, up). Else 1.
    interleave: int
    library: NativeLibrary

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def struct(self) -> structs.MatrixStruct:
        """The matrix for the kernels, without the bias; valid as long as this object."""
        return structs.MatrixStruct(
            self.weight.data_ptr(),
            None,
            len(self.weight) * PANEL_ROWS if self.interleave > 1 else self.shape[0],
            self.shape[1],
            self.dtype_code,
        )

    @property
    def dtype_code(self) -> int:
        return structs.NATIVE_DTYPE

    @property
    def bias_fp32(self) -> Tensor | None:
        """[panels · PANEL_ROWS] in panel order, in float32 or better, as the kernels read it."""
        if self.bias is None:
            return None
        bias = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32)).view(
            self.interleave, -1
        )
        padded = F.pad(bias, (0, len(self.weight) // self.interleave * PANEL_ROWS - bias.shape[1]))
        return padded.view(self.interleave, -1, PANEL_ROWS).transpose(0, 1).flatten().contiguous()

    def to_dense(self) -> Tensor:
        """Return a copy of the weight, [out, in]."""
        out, width = self.shape
        rows = (
            self.weight.unflatten(0, (-1, self.interleave)).transpose(0, 1).transpose(2, 3)
        )  # [interleave, panels, PANEL_ROWS, in / s, s]
        return (
            rows.flatten(3).flatten(1, 2)[:, : out // self.interleave, :width].reshape(out, width)
        )

    def read_rows(self, row_indices: Tensor) -> Tensor:
        """Return a copy of these rows of the weight, […] -> […, in]; `interleave` must be 1."""
        return self.weight[row_indices // PANEL_ROWS, :, row_indices % PANEL_ROWS].flatten(-2)[
            ..., : self.shape[1]
        ]

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        return pack_panels(weight, bias, self.interleave, self.library)

    def __call__(self, x: Tensor) -> Tensor:
        x, matrix, bias = x.contiguous(), self.struct, self.bias_fp32
        if bias is not None:
            matrix.bias = bias.data_ptr()
        y = x.new_empty(len(x), matrix.out)
        self.library.run_product(
            x.dtype,
            structs.ProductArgs(
                ctypes.pointer(matrix), x.data_ptr(), y.data_ptr(), len(x), torch.get_num_threads()
            ),
        )
        if self.interleave == 1:
            return y
        halves = (
            y.view(len(x), -1, self.interleave, PANEL_ROWS)
            .transpose(1, 2)
            .reshape(len(x), self.interleave, -1)
        )
        return halves[..., : self.shape[0] // self.interleave].reshape(len(x), -1)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return hidden + self(x)


@dataclass(frozen=True, slots=True)
class TiedEmbedding:
    """The embedding of a model that shares the matrix of its head."""

    head: PanelLinear
    scale: float  # of each row, rounded to the dtype; 1: none

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, [B, T] -> [B, T, H]."""
        rows = self.head.read_rows(tokens)
        return rows if self.scale == 1 else rows * self.scale


class HugePageArena:
    """Memory for all matrices of a model, in pages as large as the system gives.

    A pass reads all of it, and each page costs an address translation.
    """

    def __init__(self, n_bytes: int):
        self._memory = mmap.mmap(-1, max(n_bytes + HUGE_PAGE_BYTES, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)  # owns the memory
        self._offset = -self._bytes.data_ptr() % HUGE_PAGE_BYTES

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of unused memory that begins on a cache line."""
        size = math.prod(shape) * dtype.itemsize
        tensor = self._bytes[self._offset : self._offset + size].view(dtype).view(*shape)
        self._offset += -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return tensor


def panels_nbytes(shape: tuple[int, int], interleave: int, dtype: torch.dtype) -> int:
    """Return the bytes of a matrix (out, in) in panels, up to the next cache line."""
    size = math.prod(_panels_shape(shape, interleave, dtype)) * dtype.itemsize
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def pack_panels(
    weight: Tensor,
    bias: Tensor | None,
    interleave: int,
    library: NativeLibrary,
    arena: HugePageArena | None = None,
) -> PanelLinear:
    """Store a weight [out, in] in panels.

    The caller should release `weight`, or there are two copies of it.

    arena: where the panels go; None: memory of their own.
    """
    n_outputs, n_inputs = weight.shape
    shape = _panels_shape((n_outputs, n_inputs), interleave, weight.dtype)
    rows = F.pad(
        weight.reshape(interleave, n_outputs // interleave, n_inputs),
        (0, -n_inputs % shape[-1], 0, -(n_outputs // interleave) % PANEL_ROWS),
    )
    panel_order = (
        rows.unflatten(2, (-1, shape[-1]))
        .unflatten(1, (-1, PANEL_ROWS))
        .transpose(2, 3)
        .transpose(0, 1)
    )
    panels = weight.new_empty(shape) if arena is None else arena.allocate(shape, weight.dtype)
    panels.view(panel_order.shape).copy_(panel_order)  # [panels, interleave, in / s, PANEL_ROWS, s]
    return PanelLinear(panels, bias, (n_outputs, n_inputs), interleave, library)


def _panels_shape(
    shape: tuple[int, int], interleave: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """Return [panels, in / s, PANEL_ROWS, s]."""
    inputs_per_cell = 2 if dtype == torch.bfloat16 else 1
    return (
        interleave * -(-shape[0] // interleave // PANEL_ROWS),
        -(-shape[1] // inputs_per_cell),
        PANEL_ROWS,
        inputs_per_cell,
    )
