"""Matrices of a loaded model that are rounded to a few bits when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipsearch.engine.native.blocks import FORMAT_OF_BITS, round_weight
from skipsearch.models.experts import experts_first_order
from skipsearch.models.stored_linear import (
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
    StoredMatrix,
    TensorMatrix,
    TransposedMatrices,
)


@dataclass(frozen=True)
class RoundedMatrix:
    """A `StoredMatrix` that reads another matrix and rounds it to `bits` bits."""

    source: StoredMatrix
    bits: int  # a key of FORMAT_OF_BITS

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def format(self) -> str:
        return FORMAT_OF_BITS[self.bits].name

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    @property
    def data(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.source.data

    def row_addresses(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.source.row_addresses()

    def dequantize_rows(self, rows: Tensor | slice) -> Tensor:
        return round_weight(self.source.dequantize_rows(rows), self.bits)


def round_matrices_when_read(model: nn.Module, bits: int, dtype: torch.dtype) -> None:
    """Replace the matrices of a model by stored ones that round to `bits` bits.

    Nothing is rounded yet, and weights that are mapped from a file stay in the file. A tied
    embedding is rounded with the head. A separate embedding stays as it is, because few of its rows
    are read.
    dtype: the dtype of activations, and of the other weights from now on.
    """
    matrices = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    for path, module in list(model.named_modules()):
        parent, _, child = path.rpartition(".")
        if isinstance(module, nn.Linear):
            if child == "shared_expert_gate":  # keeps its numbers, as routers do
                continue
            bias = None if module.bias is None else module.bias.detach().to(dtype)
            stored: nn.Module = StoredLinear(_round(path, module.weight, bits), bias, dtype)
        elif isinstance(module, nn.Embedding) and module.weight.data_ptr() in matrices:
            matrix = _round(path, module.weight, bits)
            # The module still computes factors of rows, and must not hold the table.
            module.weight = nn.Parameter(module.weight.detach().to("meta"), requires_grad=False)
            stored = StoredEmbedding(matrix, module, dtype)
        elif child == "experts" and hasattr(module, "gate_up_proj"):
            stored = _round_experts(path, module, bits, dtype)
        else:
            continue
        setattr(model.get_submodule(parent), child, stored)
    for weight in model.parameters():
        if not weight.is_meta:
            weight.data = weight.data.to(dtype, copy=True)  # which releases the file


def _round_experts(path: str, module: Any, bits: int, dtype: torch.dtype) -> StoredExperts:
    """Return experts whose matrices are rounded when they are read."""
    order = experts_first_order(module)

    def take_matrix(name: str) -> RoundedMatrix:
        """Return a matrix of all experts, and leave a weight without memory in the module."""
        weight, full_name = getattr(module, name).detach(), f"{path}.{name}"
        setattr(module, name, nn.Parameter(weight.to("meta"), requires_grad=False))
        source = (
            TransposedMatrices(full_name, weight)
            if module.is_transposed
            else TensorMatrix(full_name, weight.flatten(0, 1))
        )
        return RoundedMatrix(source, bits)

    gate_up, down = take_matrix("gate_up_proj"), take_matrix("down_proj")
    return StoredExperts(module, (gate_up,), order, down, dtype)


def _round(path: str, weight: Tensor, bits: int) -> RoundedMatrix:
    return RoundedMatrix(TensorMatrix(f"{path}.weight", weight.detach()), bits)
