"""A model as the native kernels are told of it: the structs of its weights, and what they point to."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from skipsearch.engine.native import abi
from skipsearch.engine.native.panels import Panels, TiedEmbedding
from skipsearch.models.lean import MLP, Attention, LeanAdapter
from skipsearch.models.linear import Linear
from skipsearch.models.norms import Norm

ACTS = {"GELUTanh": abi.GELU_TANH, "NewGELUActivation": abi.GELU_TANH, "GELUActivation": abi.GELU}


def scale_of(table: nn.Embedding) -> float:
    """What an embedding multiplies its rows by, as it rounds it."""
    found: Any = getattr(table, "embed_scale", None)
    return 1.0 if found is None else float(torch.as_tensor(found).to(table.weight.dtype))


def act_of(mlp: MLP) -> int | None:
    return abi.SILU if mlp.act is F.silu else ACTS.get(type(mlp.act).__name__)


class _Describing:
    """Makes the structs of a model, and holds what they point to."""

    def __init__(self, dtype: torch.dtype):
        self.wide, self.held = torch.promote_types(dtype, torch.float32), list[Any]()

    def norm(self, norm: Norm | None) -> abi.Norm:
        if norm is None:
            return abi.Norm(None, 0.0, 0)
        weight = self._kept(norm.weight.to(self.wide).contiguous())
        return abi.Norm(weight.data_ptr(), norm.eps, norm.width)

    def matrix(self, matrix: Linear) -> abi.Matrix:
        assert isinstance(matrix, Panels)
        found, bias = self._kept(matrix).matrix, matrix.wide_bias
        found.bias = None if bias is None else self._kept(bias).data_ptr()
        return found

    def layer(self, attention: Attention, mlp: MLP, window: int, table: int) -> abi.Layer:
        return abi.Layer(
            self.norm(attention.norm), self.norm(attention.q_norm), self.norm(attention.k_norm), self.norm(attention.post_norm),
            self.norm(mlp.norm), self.norm(mlp.post_norm), self.matrix(attention.qkv), self.matrix(attention.out), self.matrix(mlp.gate_up),
            self.matrix(mlp.down), attention.heads, attention.kv_heads, attention.head_dim, window, table, act_of(mlp), attention.scale)

    def _kept(self, thing: Any) -> Any:
        self.held.append(thing)
        return thing


def described(lean: LeanAdapter, kinds: list[str | None]) -> tuple[abi.Model, list[Any]]:
    """(the model for the kernels, what it points to). kinds: of layers, in the order of their tables of angles."""
    spec, all_of = lean.spec, _Describing(lean.spec.dtype)
    windows = sorted({attention.kind.window or 0 for attention, _ in lean.layers})
    layers = (abi.Layer * len(lean.layers))(*(
        all_of.layer(attention, mlp, windows.index(attention.kind.window or 0), kinds.index(attention.kind.layer_type))
        for attention, mlp in lean.layers))
    table: Any = lean._embedding
    known = isinstance(table, TiedEmbedding) or (isinstance(table, nn.Embedding) and table.max_norm is None)
    rows = table.weight.data_ptr() if known and not isinstance(table, TiedEmbedding) else None
    scale = (table.scale if isinstance(table, TiedEmbedding) else scale_of(table)) if known else 0.0
    numbers = (ctypes.c_int64 * len(windows))(*windows)
    model = abi.Model(abi.DTYPES[spec.dtype_name], spec.hidden, spec.vocab, len(layers), len(windows), layers, numbers,
                      all_of.norm(lean.norm), all_of.matrix(lean.unembed), rows, scale)
    return model, [*all_of.held, layers, numbers, table]
