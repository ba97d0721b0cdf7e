"""Modules whose weights stay as a file stores them, until an engine packs or unpacks them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipsearch.models.experts import experts_first_order, name_input_weight

PART_ELEMENTS = 1 << 20  # of a weight that is dequantised at once


class StoredMatrix(Protocol):
    """A matrix [out, in] in a file, whose rows are read when they are needed."""

    @property
    def name(self) -> str:
        """The name of the matrix in the file, for error messages."""

    @property
    def format(self) -> str:
        """The name of its number format, such as q4_1 or bf16."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out, in)."""

    @property
    def data(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of each row, [out, row bytes], mapped from the file."""

    def row_addresses(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the address of each output's bytes, valid as long as `data`."""

    def dequantize_rows(self, rows: Tensor | slice) -> Tensor:
        """Return rows of the weight, [rows, in] in float32."""


@dataclass(frozen=True)
class TensorMatrix:
    """A `StoredMatrix` over a weight of a loaded model, which may be mapped from a file."""

    name: str
    weight: Tensor  # [out, in]

    @property
    def format(self) -> str:
        return str(self.weight.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def data(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.weight.view(torch.uint8).numpy()

    def row_addresses(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        row_bytes = self.weight.stride(0) * self.weight.itemsize
        return self.weight.data_ptr() + np.arange(self.shape[0]) * row_bytes

    def dequantize_rows(self, rows: Tensor | slice) -> Tensor:
        return self.weight[rows].float()


@dataclass(frozen=True)
class TransposedMatrices(TensorMatrix):
    """The matrices of experts one below the other, from a weight [E, in, out]."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0] * self.weight.shape[2], self.weight.shape[1]

    def row_addresses(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        raise TypeError(f"the rows of {self.name} are not contiguous")

    def dequantize_rows(self, rows: Tensor | slice) -> Tensor:
        if isinstance(rows, slice):
            rows = torch.arange(self.shape[0])[rows]
        width = self.weight.shape[2]
        return self.weight.transpose(1, 2)[rows // width, rows % width].float()


class StoredLinear(nn.Module):
    """An `nn.Linear` whose weight is stored in a file."""

    def __init__(self, matrix: StoredMatrix, bias: Tensor | None, dtype: torch.dtype):
        """Make the module. dtype: the dtype of `bias`, and of the weight after it is unpacked."""
        super().__init__()
        self.matrix, self.bias, self.dtype = matrix, bias, dtype
        self.out_features, self.in_features = matrix.shape

    @property
    def weight(self) -> Tensor:
        """An empty tensor, for code that asks for the weight's dtype or device."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, which is read part by part: slow, and meant for checks."""
        parts = [F.linear(x, part.to(self.dtype)) for part in dequantize_parts(self.matrix)]
        product = torch.cat(parts, dim=-1)
        return product if self.bias is None else product + self.bias

    def unpack(self, weight: Tensor | None = None) -> nn.Linear:
        """Return a module with the weight in memory.

        weight: the tensor that it shares with an embedding; None: read the weight.
        """
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        if weight is None:
            weight = unpack_matrix(self.matrix, self.dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear


class StackedLinear(nn.Module):
    """An `nn.Linear` whose rows are those of several matrices in a file, one after the other.

    order: the row of the matrices for each output; None: the same.
    """

    def __init__(self, parts: Sequence[StoredLinear], order: Tensor | None):
        super().__init__()
        self.parts, self.order = nn.ModuleList(parts), order

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., in] to [..., out]."""
        product = torch.cat([part(x) for part in self.parts], dim=-1)
        return product if self.order is None else product[..., self.order]


class StoredExperts(nn.Module):
    """The experts of a layer, whose weights are stored in a file.

    gate_up: parts with the same inputs H, together [2 · E · I, H], or [E · I, H] of experts without
    gates. order: the row of the parts,
    side by side, for each row of the gates of all experts and then of their ups; None: the same.
    down: [E · H, I]. Biases stay in `module`.
    """

    def __init__(
        self,
        module: nn.Module,
        gate_up: tuple[StoredMatrix, ...],
        order: Tensor | None,
        down: StoredMatrix,
        dtype: torch.dtype,
    ):
        """Make the module. module: what it replaces, whose weights are not read."""
        super().__init__()
        self.module: Any = module
        self.gate_up, self.order, self.down, self.dtype = gate_up, order, down, dtype

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the experts, whose weights are read each time: slow, and meant for checks."""
        result: Tensor = self.unpack()(hidden, chosen, weights)
        return result

    def unpack(self) -> nn.Module:
        """Return the experts with their weights in memory."""
        module: Any = copy.copy(self.module)
        module.__dict__["_parameters"] = dict(module._parameters)  # `copy.copy` shares it
        rows = torch.cat([unpack_matrix(part, self.dtype) for part in self.gate_up])
        if self.order is not None:
            rows = rows[self.order]
        gate_up = torch.empty_like(rows)
        gate_up[experts_first_order(self.module)] = rows
        gate_up, down = (
            weight.view(len(module.down_proj), -1, weight.shape[1])
            for weight in (gate_up, unpack_matrix(self.down, self.dtype))
        )
        if module.is_transposed:
            gate_up, down = (weight.transpose(1, 2).contiguous() for weight in (gate_up, down))
        setattr(module, name_input_weight(module), nn.Parameter(gate_up, requires_grad=False))
        module.down_proj = nn.Parameter(down, requires_grad=False)
        return module


class StoredEmbedding(nn.Module):
    """An embedding whose table is stored in a file."""

    def __init__(self, matrix: StoredMatrix, table: nn.Embedding, dtype: torch.dtype):
        """Make the module. table: the module that it replaces, whose weight is not read."""
        super().__init__()
        self.matrix, self.table, self.dtype = matrix, table, dtype

    @property
    def weight(self) -> Tensor:
        """The bytes of the table, to tell whether the head shares them."""
        return torch.from_numpy(self.matrix.data)

    @property
    def embed_scale(self) -> Any:
        """The factor of each row, or None."""
        return getattr(self.table, "embed_scale", None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens."""
        rows = self.matrix.dequantize_rows(tokens.flatten().cpu()).to(self.dtype)
        rows = rows.view(*tokens.shape, -1)
        scale = self.embed_scale
        return rows if scale is None else rows * torch.as_tensor(scale).to(self.dtype)

    def unpack(self) -> nn.Embedding:
        """Return the module with its table in memory."""
        weight = unpack_matrix(self.matrix, self.dtype)
        self.table.weight = nn.Parameter(weight, requires_grad=False)
        return self.table


def list_stored_matrices(model: nn.Module) -> list[StoredMatrix]:
    """Return the matrices that modules of a model read from files, each once."""
    matrices: list[StoredMatrix] = []
    for module in model.modules():
        if isinstance(module, StoredExperts):
            matrices += [*module.gate_up, module.down]
        elif isinstance(module, StoredLinear | StoredEmbedding):
            matrices.append(module.matrix)
    return list({matrix.data.ctypes.data: matrix for matrix in matrices}.values())


def dequantize_parts(matrix: StoredMatrix) -> Iterator[Tensor]:
    """Yield the weight in float32, a few rows at a time, so that little memory is taken."""
    out, width = matrix.shape
    step = max(1, PART_ELEMENTS // width)
    for first in range(0, out, step):
        yield matrix.dequantize_rows(slice(first, first + step))


def unpack_matrix(matrix: StoredMatrix, dtype: torch.dtype) -> Tensor:
    """Return the weight in `dtype`, [out, in]."""
    weight = torch.empty(matrix.shape, dtype=dtype)
    first = 0
    for part in dequantize_parts(matrix):
        weight[first : first + len(part)] = part
        first += len(part)
    return weight
