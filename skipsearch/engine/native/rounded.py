"""Round a fused model's weights to fewer bits, as a reference for the check of the engine native.

The rounded weights keep the dtype and the layout of the fused model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from skipsearch.engine.native.blocks import round_weight
from skipsearch.engine.native.model_struct import embedding_scale, is_tied
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.linear import Linear, pack_linear
from skipsearch.models.fused.sublayers import MLP, Attention


def round_model(fused_model: FusedAdapter, bits: int) -> FusedAdapter:
    """Return the model with rounded matrices.

    A layer is rounded each time that a pass reads it, so that memory holds no second copy of the
    model.
    """
    rounded: Any = copy.copy(fused_model)

    def round_linear(matrix: Linear) -> Linear:
        return matrix.pack_like(round_weight(matrix.to_dense(), bits), matrix.bias)

    rounded.layers = _RoundedLayers(fused_model.layers, round_linear)
    table = round_weight(fused_model.unembed.to_dense(), bits)
    rounded.unembed = pack_linear(table, fused_model.unembed.bias, shared=True)
    if is_tied(fused_model):
        scale = embedding_scale(fused_model._embedding, fused_model.spec.dtype)
        rounded._embedding = lambda tokens: F.embedding(tokens, table) * scale
    return rounded


class _RoundedLayers(Sequence[tuple[Attention, MLP]]):
    """A list of layers whose matrices are rounded when they are read."""

    def __init__(self, layers: Sequence[tuple[Attention, MLP]], round_linear: Any):
        self._layers, self._round_linear = layers, round_linear
        self._latest: tuple[int, tuple[Attention, MLP]] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, i: Any) -> Any:
        if self._latest is not None and self._latest[0] == i:
            return self._latest[1]
        attention, mlp = self._layers[i]
        attention = replace(
            attention, qkv=self._round_linear(attention.qkv), out=self._round_linear(attention.out)
        )
        mlp = replace(
            mlp, gate_up=self._round_linear(mlp.gate_up), down=self._round_linear(mlp.down)
        )
        self._latest = i, (attention, mlp)
        return attention, mlp
