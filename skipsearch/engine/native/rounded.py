"""The model that fewer bits make of a fused one, in its own dtype and layout, to compare with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native.blocks import round_weight
from skipsearch.engine.native.model_struct import embedding_scale, is_tied
from skipsearch.models.activations import round_activations
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.linear import Linear, pack_linear
from skipsearch.models.fused.sublayers import MLP, Attention


def round_model(fused_model: FusedAdapter, bits: int, activations: str) -> FusedAdapter:
    """Return the model with rounded matrices, and with rounded inputs of them.

    A layer is rounded whenever a pass comes to it, so that no second copy of the model is held.
    activations: how inputs are rounded, one of ACTIVATIONS.
    """
    rounded: Any = copy.copy(fused_model)

    def round_linear(matrix: Linear) -> Linear:
        packed = pack_linear(round_weight(matrix.to_dense(), bits), matrix.bias)
        return RoundedInputs(packed, activations)

    rounded.layers = _RoundedLayers(fused_model.layers, round_linear)
    rounded.unembed = round_linear(fused_model.unembed)
    if is_tied(fused_model):
        table = rounded.unembed.to_dense()
        scale = embedding_scale(fused_model._embedding, fused_model.spec.dtype)
        rounded._embedding = lambda tokens: F.embedding(tokens, table) * scale
    return rounded


@dataclass(frozen=True)
class RoundedInputs:
    """A `Linear` whose inputs are rounded in blocks of 32."""

    matrix: Linear
    activations: str

    @property
    def weight(self) -> Tensor:
        return self.matrix.weight

    @property
    def bias(self) -> Tensor | None:
        return self.matrix.bias

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def to_dense(self) -> Tensor:
        return self.matrix.to_dense()

    def pack_like(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.matrix.pack_like(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix(round_activations(x, self.activations))

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.matrix.add_to(hidden, round_activations(x, self.activations))


class _RoundedLayers(Sequence[tuple[Attention, MLP]]):
    """A list of layers whose matrices are rounded when they are read."""

    def __init__(self, layers: Sequence[tuple[Attention, MLP]], round_linear: Any):
        self._layers, self._round_linear = layers, round_linear

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, i: Any) -> Any:
        attention, mlp = self._layers[i]
        attention = replace(
            attention, qkv=self._round_linear(attention.qkv), out=self._round_linear(attention.out)
        )
        mlp = replace(
            mlp, gate_up=self._round_linear(mlp.gate_up), down=self._round_linear(mlp.down)
        )
        return attention, mlp
