"""Modules of transformers whose matrices the kernels multiply in the formats of a GGUF file.

A model whose layers no engine has fused runs as transformers computes it. Its matrices need not be
unpacked for that: each is packed in panels, and its module calls the kernel of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipsearch.engine.native.panels import PanelLinear, PanelPacker
from skipsearch.engine.native.structs import PANEL_ROWS
from skipsearch.models.experts import experts_first_order, name_input_weight
from skipsearch.models.fused.linear import StoredFusedLinear
from skipsearch.models.stored_linear import StoredEmbedding, StoredExperts, StoredLinear


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is in panels.

    columns: the input for each column of the panels; None: the same order.
    """

    def __init__(self, matrix: PanelLinear, columns: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        # Counts as memory. Two dimensions, by which a part of a layer with matrices is recognised.
        self.panels = nn.Parameter(matrix.weight.view(1, -1), requires_grad=False)
        self.matrix, self.columns = matrix, columns

    @property
    def weight(self) -> Tensor:
        """An empty tensor, for code that asks for the weight's dtype or device."""
        return torch.empty(0, dtype=self.matrix.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.matrix.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., in] to [..., out]."""
        return _multiply(self.matrix, x if self.columns is None else x[..., self.columns])


class FileEmbedding(nn.Module):
    """An embedding whose rows are read from the file, which the system keeps in memory."""

    def __init__(self, stored: StoredEmbedding):
        super().__init__()
        table = stored.table
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx, self.embed_scale = table.padding_idx, stored.embed_scale
        # Not as a module: its table has the size of the whole embedding, and no numbers.
        self._read_rows, self.dtype = stored.forward, stored.dtype

    @property
    def weight(self) -> Tensor:
        """An empty tensor, for code that asks for the weight's dtype or device."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, [...] -> [..., H]."""
        return self._read_rows(tokens)


class PackedExperts(nn.Module):
    """The experts of a layer, whose matrices are parts of two in panels."""

    def __init__(self, module: Any, gate_up: PanelLinear, down: PanelLinear):
        """Make the module. module: what it replaces, which keeps biases and the activation."""
        super().__init__()
        n_experts = len(module.down_proj)
        # One entry for each expert, from which the size of an expert is known.
        self.panels = nn.ParameterList(
            nn.Parameter(matrix.weight.view(n_experts, -1), requires_grad=False)
            for matrix in (gate_up, down)
        )
        self._gate_up, self._down, self._n_experts = gate_up, down, n_experts
        self._apply_gate: Callable[[Tensor], Tensor] = (
            module._apply_gate if module.has_gate else module.act_fn
        )
        names = f"{name_input_weight(module)}_bias", "down_proj_bias"
        self._biases = [getattr(module, name) for name in names] if module.has_bias else None

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the chosen experts: hidden [N, H]; chosen, weights [N, k] -> [N, H]."""
        n_rows, per_row = chosen.shape
        experts, pairs = chosen.flatten().sort(stable=True)  # pairs of a row and an expert
        counts = torch.bincount(experts, minlength=self._n_experts)
        first_rows = F.pad(counts.cumsum(0), (1, 0))
        dtype = self._gate_up.dtype
        inputs = hidden.to(dtype)[pairs.div(per_row, rounding_mode="floor")]
        gate_up = self._gate_up.multiply_parts(inputs, first_rows)
        if self._biases is not None:
            gate_up = gate_up + self._biases[0][experts]
        out = self._down.multiply_parts(self._apply_gate(gate_up).to(dtype), first_rows)
        if self._biases is not None:
            out = out + self._biases[1][experts]
        # Each row adds its experts in the order in which it chose them.
        by_row = torch.empty_like(out)
        by_row[pairs] = out * weights.flatten()[pairs, None].to(out.dtype)
        return by_row.view(n_rows, per_row, -1).sum(dim=1).to(hidden.dtype)


def pack_stored_modules(model: nn.Module, packer: PanelPacker) -> None:
    """Replace the modules that read matrices from a file by packed ones.

    Experts whose sizes are no multiples of a panel are unpacked.
    """
    for parent, name, module in list(_list_stored(model)):
        setattr(parent, name, _pack(module, packer))


def _list_stored(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (parent, name, module) of each module that reads matrices from a file."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if isinstance(module, StoredLinear | StoredEmbedding | StoredExperts):
                yield parent, name, module


def _pack(module: nn.Module, packer: PanelPacker) -> nn.Module:
    if isinstance(module, StoredEmbedding):
        return FileEmbedding(module)
    if isinstance(module, StoredLinear):
        matrix: Any = module.matrix
        columns = matrix.column_order
        if columns is not None:  # blocks cannot be reordered, and inputs can
            matrix, columns = replace(matrix, column_order=None), columns.argsort()
        fused = StoredFusedLinear((matrix,), module.bias, module.dtype)
        return PackedLinear(packer.pack(fused), columns)
    assert isinstance(module, StoredExperts)
    n_experts = len(module.module.down_proj)
    gate_up = StoredFusedLinear(module.gate_up, None, module.dtype, _place_rows(module))
    down = StoredFusedLinear((module.down,), None, module.dtype)
    if any(matrix.shape[0] // n_experts % PANEL_ROWS for matrix in (gate_up, down)):
        return module.unpack()
    matrices = packer.pack(gate_up), packer.pack(down)
    if any(len({*matrix.kinds}) > 1 for matrix in matrices):  # parts would differ in size
        return module.unpack()
    return PackedExperts(module.module, *matrices)


def _place_rows(experts: StoredExperts) -> Tensor:
    """Return the row of the file for each row of [E · 2 · I, H], as the module has them."""
    places = experts_first_order(experts.module)
    rows = torch.empty_like(places)
    rows[places] = torch.arange(len(places)) if experts.order is None else experts.order
    return rows


def _multiply(matrix: PanelLinear, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).to(matrix.dtype)
    return matrix(flat).view(*x.shape[:-1], matrix.shape[0]).to(x.dtype)
