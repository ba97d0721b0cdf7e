"""Sub-layers as functions of tensors alone: what is compiled once for a shape and then serves every layer and every mask.

A piece is made from one layer as its pattern. Its weights are arguments, so that other layers of that pattern bring their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from skipsearch.models.lean import MLP, Attention
from skipsearch.models.linear import Linear, Packed, Plain
from skipsearch.models.norms import Norm

Weights = list[Tensor]


@dataclass(frozen=True, slots=True)
class RowSums(Plain):
    """A `Plain` matrix times one row, as products and sums: a compiler turns that into one loop that reads at memory speed."""

    def __call__(self, x: Tensor) -> Tensor:
        y = (self.weight.float() * x.float()).sum(dim=-1)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)[None]

    def added(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self(x)


def weights_of(part: Attention | MLP) -> Weights:
    """The tensors of a sub-layer, in the order that `rebuilt` takes them."""
    found: Weights = []
    for name in part.__dataclass_fields__:
        value = getattr(part, name)
        if isinstance(value, Norm):
            found.append(value.weight)
        elif hasattr(value, "added"):  # a Linear
            found += [value.weight] if value.bias is None else [value.weight, value.bias]
    return found


def rebuilt(pattern: Attention | MLP, weights: Weights, one_row: bool) -> Any:
    """`pattern` with other weights; its plain matrices as sums, where there is one row."""
    left = list(weights)
    fields: dict[str, Any] = {}
    for name in pattern.__dataclass_fields__:
        value = getattr(pattern, name)
        if isinstance(value, Norm):
            fields[name] = replace(value, weight=left.pop(0))
        elif hasattr(value, "added"):
            fields[name] = _matrix(value, left.pop(0), None if value.bias is None else left.pop(0), one_row)
    return replace(pattern, **fields)


def _matrix(pattern: Linear, weight: Tensor, bias: Tensor | None, one_row: bool) -> RowSums | Plain | Packed:
    if isinstance(pattern, Packed):
        return Packed(weight, bias, pattern.bytes)
    return RowSums(weight, bias) if one_row else Plain(weight, bias)


def attention_piece(pattern: Attention, one_row: bool) -> Callable[..., Tensor]:
    """(h [T, H], keys and values [1, kv, capacity, D], slots [T], cos and sin [1, T, 1, R], shown, *weights) -> h.

    shown: the additive mask [1, 1, T, keys]; for one row, which sees all of them, any tensor [keys]: a kernel without a mask grows
    several times slower with the context. K/V are written in place.
    """

    def run(h: Tensor, keys: Tensor, values: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, shown: Tensor, *weights: Tensor) -> Tensor:
        part: Attention = rebuilt(pattern, list(weights), one_row)
        q, k, v = part.heads_of(h if part.norm is None else part.norm(h), 1, h.shape[0], cos, sin)
        keys.index_copy_(2, slots, k)
        values.index_copy_(2, slots, v)
        n = shown.shape[-1]
        seen = F.scaled_dot_product_attention(q, keys[:, :, :n], values[:, :, :n], None if one_row else shown,
                                              scale=part.scale, enable_gqa=part.heads != part.kv_heads)
        return part.summed(h, seen.transpose(1, 2).reshape(h.shape[0], part.heads * part.head_dim))

    return run


def mlp_piece(pattern: MLP, one_row: bool) -> Callable[..., Tensor]:
    """(h [T, H], *weights) -> h [T, H]."""

    def run(h: Tensor, *weights: Tensor) -> Tensor:
        part: MLP = rebuilt(pattern, list(weights), one_row)
        return part(h)

    return run


def layer_piece(attention: Attention, mlp: MLP, one_row: bool) -> Callable[..., Tensor]:
    """Both sub-layers of a layer, the arguments those of `attention_piece` and then the weights of `mlp`."""
    first, second, own = attention_piece(attention, one_row), mlp_piece(mlp, one_row), len(weights_of(attention))

    def run(h: Tensor, keys: Tensor, values: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, shown: Tensor, *weights: Tensor) -> Tensor:
        return second(first(h, keys, values, slots, cos, sin, shown, *weights[:own]), *weights[own:])

    return run


def head_piece(norm: Norm, unembed: Linear, one_row: bool) -> Callable[..., Tensor]:
    """(h [T, H], norm's weight, matrix, its bias if it has one) -> logits [T, V]."""

    def run(h: Tensor, weight: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return _matrix(unembed, matrix, bias, one_row)(replace(norm, weight=weight)(h))

    return run
