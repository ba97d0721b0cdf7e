"""The model that 8-bit weights make of a fused one, in its own dtype and layout, to compare
with.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skipsearch.engine.native.int8 import CHUNK_WEIGHTS, dequantize_q8, quantize_q8
from skipsearch.engine.native.model_struct import embedding_scale, is_tied
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.linear import Linear, pack_linear
from skipsearch.models.fused.sublayers import MLP, Attention


def round_to_int8(fused_model: FusedAdapter) -> FusedAdapter:
    """Return the model with its matrices rounded.

    A layer is rounded whenever a pass comes to it, so that no second copy of the model is held.
    """
    rounded: Any = copy.copy(fused_model)
    embedding: Any = fused_model._embedding
    weight = round_weight(fused_model.unembed.to_dense())
    rounded.layers = _RoundedLayers(fused_model.layers)
    rounded.unembed = pack_linear(weight, fused_model.unembed.bias, shared=True)
    if is_tied(fused_model):
        rounded._embedding = lambda tokens: F.embedding(tokens, weight) * embedding_scale(embedding)
    return rounded


def round_weight(weight: Tensor) -> Tensor:
    """Return a matrix [out, in] after rounding to 8 bits, in its own dtype."""
    rows = max(1, CHUNK_WEIGHTS // weight.shape[1])
    return torch.cat(
        [dequantize_q8(*quantize_q8(part)).to(weight.dtype) for part in weight.split(rows)]
    )


class _RoundedLayers(Sequence[tuple[Attention, MLP]]):
    """A list of layers whose matrices are rounded when they are read."""

    def __init__(self, layers: Sequence[tuple[Attention, MLP]]):
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, i: Any) -> Any:
        attention, mlp = self._layers[i]
        return (
            replace(attention, qkv=_round_linear(attention.qkv), out=_round_linear(attention.out)),
            replace(mlp, gate_up=_round_linear(mlp.gate_up), down=_round_linear(mlp.down)),
        )


def _round_linear(matrix: Linear) -> Linear:
    return matrix.pack_like(round_weight(matrix.to_dense()), matrix.bias)
