"""Weight matrices in the layout that is fastest for a few rows on their device and in their dtype.

- MkldnnLinear: oneDNN's blocked layout, in which eight rows cost little more than one; on a CPU, in
  dtypes that oneDNN has kernels for
- PlainLinear: everything else
- StoredFusedLinear: rows that are still in a file, which an engine packs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipsearch.models.stored_linear import StoredLinear, StoredMatrix, unpack_matrix

# The number of rows for which oneDNN chooses its blocks, which then work for any number of rows.
# For one row it would choose no blocks.
PACK_ROWS = 16


class Linear(Protocol):
    """A matrix with an optional bias, in any layout."""

    @property
    def weight(self) -> Tensor:
        """The weight as stored; the tensor may be opaque."""

    @property
    def bias(self) -> Tensor | None:
        """The bias, [out]; None without a bias."""

    @property
    def nbytes(self) -> int:
        """The bytes of the weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out, in)."""

    def to_dense(self) -> Tensor:
        """Return the weight as [out, in]: the stored tensor itself if it has that layout."""

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack another matrix [out, in] in this layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: [N, in] -> [N, out], bias included."""

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Return hidden + self(x), [N, out], in one kernel if there is one."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A matrix as torch stores it."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def to_dense(self) -> Tensor:
        return self.weight

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return pack_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(hidden if self.bias is None else hidden + self.bias, x, self.weight.t())


@dataclass(frozen=True, slots=True)
class MkldnnLinear:
    """A matrix for oneDNN, with the operator that `torch.compile` uses for frozen weights."""

    # In blocks that only oneDNN can read or, if an embedding shares the weight, [out, in], which
    # the operator also accepts.
    weight: Tensor
    bias: Tensor | None
    nbytes: int  # stored, because an opaque tensor has no size

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def to_dense(self) -> Tensor:
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return pack_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return result

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(hidden)  # oneDNN's fused operator would first copy `hidden`


@dataclass(frozen=True)
class StoredFusedLinear:
    """Matrices in a file that share their inputs, as one matrix. Engines pack it."""

    parts: tuple[StoredMatrix, ...]  # outputs side by side
    bias: Tensor | None
    dtype: torch.dtype  # of the unpacked weight
    order: Tensor | None = None  # the row of the merged matrix for each row of the result

    @property
    def weight(self) -> Tensor:
        """The bytes of the first part, to tell whether two matrices share them."""
        return torch.from_numpy(self.parts[0].data)

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def row_parts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the index of the part that each row is in."""
        parts = np.repeat(np.arange(len(self.parts)), [part.shape[0] for part in self.parts])
        return parts if self.order is None else parts[self.order.numpy()]

    def row_addresses(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the address of each row's bytes, valid as long as the file is mapped."""
        addresses = np.concatenate([part.row_addresses() for part in self.parts])
        return addresses if self.order is None else addresses[self.order.numpy()]

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        """Return these rows of the weight, [rows, in] in float32."""
        if self.order is not None:
            rows = self.order[rows]
        weight = torch.empty(len(rows), self.shape[1])
        first = 0
        for part in self.parts:
            is_inside = (rows >= first) & (rows < first + part.shape[0])
            if is_inside.any():
                weight[is_inside] = part.dequantize_rows(rows[is_inside] - first)
            first += part.shape[0]
        return weight

    def to_dense(self) -> Tensor:
        weight = torch.cat([unpack_matrix(part, self.dtype) for part in self.parts])
        return weight if self.order is None else weight[self.order]

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return pack_linear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.to_dense(), self.bias)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return hidden + self(x)


def pack_linear(weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
    """Pack a matrix [out, in]. Memory holds two copies until the caller releases `weight`.

    shared: other modules also read the weight, so its layout is kept.
    """
    dense = weight.contiguous()
    if not _has_mkldnn_kernel(weight.device, weight.dtype):
        return PlainLinear(dense, bias)
    packed = dense if shared else torch.ops.mkldnn._reorder_linear_weight(dense, PACK_ROWS)
    return MkldnnLinear(packed, bias, weight.nbytes)


def _has_mkldnn_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def fuse_linears(modules: Sequence[Any], order: Tensor | None = None) -> Linear:
    """Merge `nn.Linear` modules with the same input into one matrix, outputs side by side.

    order: for each row of the result, its row in the merged matrix. The modules' weights are freed.
    If a module is a `StoredLinear`, all have to be, and the matrix stays in the file.
    """
    if isinstance(modules[0], StoredLinear):
        return _fuse_stored(modules, order)
    weight = (
        torch.cat([m.weight for m in modules]) if len(modules) > 1 else modules[0].weight.detach()
    )
    bias = None
    if any(m.bias is not None for m in modules):
        biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules]
        bias = torch.cat(biases)
    if order is not None:
        weight, bias = weight[order], None if bias is None else bias[order]
    matrix = pack_linear(weight, bias)
    for module in modules:
        free_weights_(module)
    return matrix


def _fuse_stored(modules: Sequence[StoredLinear], order: Tensor | None) -> StoredFusedLinear:
    bias = None
    first_bias = next((m.bias for m in modules if m.bias is not None), None)
    if first_bias is not None:
        bias = torch.cat(
            [first_bias.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules]
        )
        bias = bias if order is None else bias[order]
    dtype = modules[0].dtype
    return StoredFusedLinear(tuple(m.matrix for m in modules), bias, dtype, order)


def free_weights_(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data = weight.data.new_empty(0)
