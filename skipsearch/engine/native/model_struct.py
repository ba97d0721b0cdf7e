"""The structs that describe a model to the native kernels, and the memory that they point to."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipsearch.engine.native import structs
from skipsearch.engine.native.panels import PanelEmbedding, PanelLinear
from skipsearch.models.fused.attention import Attention
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.linear import Linear
from skipsearch.models.fused.mlp import (
    MLP,
    Activation,
    ClampedSwiGLU,
    Routing,
    SharedExpert,
    gelu_tanh,
)
from skipsearch.models.fused.norms import RMSNorm
from skipsearch.models.loading.quantize import split_kv_cache_dtype
from skipsearch.models.stored_linear import StoredEmbedding

ACTIVATION_CODES = {"NewGELUActivation": structs.GELU_TANH, "GELUActivation": structs.GELU}


def embedding_scale(table: Any, dtype: torch.dtype) -> float:
    """Return the factor of an embedding's rows, rounded to their dtype; 1 if it has none."""
    scale: Any = getattr(table, "embed_scale", None)
    return 1.0 if scale is None else float(torch.as_tensor(scale).to(dtype))


def is_tied(fused_model: FusedAdapter) -> bool:
    """Return whether embedding and head share one matrix."""
    embedding: Any = fused_model._embedding
    head = fused_model.unembed.weight
    return (
        isinstance(embedding, nn.Embedding | StoredEmbedding)
        and not head.is_mkldnn
        and embedding.weight.data_ptr() == head.data_ptr()
    )


def activation_code(act: Activation) -> int | None:
    """Return the number by which the kernels know an activation; None if they do not have it."""
    if isinstance(act, ClampedSwiGLU):
        return structs.CLAMPED_SWIGLU
    if act.activation is F.silu:
        return structs.SILU
    if act.activation is gelu_tanh:
        return structs.GELU_TANH
    return ACTIVATION_CODES.get(type(act.activation).__name__)


class _StructBuilder:
    """A builder of the structs of a model, which also owns the memory that they point to."""

    def __init__(self, dtype: torch.dtype):
        self.wide_dtype, self.keepalive = torch.promote_types(dtype, torch.float32), list[Any]()

    def build_norm(self, norm: RMSNorm | None) -> structs.NormStruct:
        if norm is None:
            return structs.NormStruct(None, 0.0, 0)
        weight = self._retain(norm.weight.to(self.wide_dtype).contiguous())
        return structs.NormStruct(weight.data_ptr(), norm.eps, norm.width)

    def build_matrix(self, matrix: Linear) -> structs.MatrixStruct:
        assert isinstance(matrix, PanelLinear)
        struct, bias = self._retain(matrix).struct, matrix.bias_fp32
        struct.bias = None if bias is None else self._retain(bias).data_ptr()
        return struct

    def build_layer(
        self, attention: Attention, mlp: MLP, window_index: int, rotary_index: int
    ) -> structs.LayerStruct:
        clamped = mlp.act if isinstance(mlp.act, ClampedSwiGLU) else ClampedSwiGLU(0, 0)
        return structs.LayerStruct(
            self.build_norm(attention.norm),
            self.build_norm(attention.q_norm),
            self.build_norm(attention.k_norm),
            self.build_norm(attention.post_norm),
            self.build_norm(mlp.norm),
            self.build_norm(mlp.post_norm),
            self.build_matrix(attention.qkv),
            self.build_matrix(attention.out),
            self.build_matrix(mlp.gate_up),
            self.build_matrix(mlp.down),
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            window_index,
            rotary_index,
            activation_code(mlp.act),
            clamped.alpha,
            clamped.limit,
            attention.scale,
            self._retain_factors(attention.query_factors),
            attention.query_period,
            self._retain_sinks(attention.sinks),
            *self._build_routing(mlp.routing),
            *self._build_shared_expert(mlp.shared),
        )

    def _retain_factors(self, factors: Tensor | None) -> int | None:
        return None if factors is None else self._retain(factors.double()).data_ptr()

    def _retain_sinks(self, sinks: Tensor | None) -> int | None:
        if sinks is None:
            return None
        return self._retain(sinks.to(self.wide_dtype).contiguous()).data_ptr()

    def _build_shared_expert(self, shared: SharedExpert | None) -> list[structs.MatrixStruct]:
        if shared is None:
            return [structs.MatrixStruct() for _ in range(3)]
        return [self.build_matrix(m) for m in (shared.gate_up, shared.down, shared.gate)]

    def _build_routing(self, routing: Routing | None) -> tuple[structs.MatrixStruct, int, int, int]:
        if routing is None:
            return structs.MatrixStruct(), 0, 0, 0
        router = self.build_matrix(routing.router)
        return router, routing.n_experts, routing.per_token, routing.normalizes

    def _retain(self, thing: Any) -> Any:
        self.keepalive.append(thing)
        return thing


def build_model_struct(
    fused_model: FusedAdapter, layer_types: list[str | None]
) -> tuple[structs.ModelStruct, list[Any]]:
    """Return the struct of a model, and the objects that own the memory that it points to.

    layer_types: the layer types, in the order of their rotary tables.
    """
    spec, builder = fused_model.spec, _StructBuilder(fused_model.spec.dtype)
    windows = sorted({attention.kind.window or 0 for attention, _ in fused_model.layers})
    layers = (structs.LayerStruct * len(fused_model.layers))(
        *(
            builder.build_layer(
                attention,
                mlp,
                windows.index(attention.kind.window or 0),
                layer_types.index(attention.kind.layer_type),
            )
            for attention, mlp in fused_model.layers
        )
    )
    embedding: Any = fused_model._embedding
    rows_ptr = panel_structs = None
    scale = 0.0
    if isinstance(embedding, PanelEmbedding):
        panel_structs, scale = embedding.matrix.panel_structs, embedding.scale
    elif isinstance(embedding, nn.Embedding) and embedding.max_norm is None:
        rows_ptr, scale = embedding.weight.data_ptr(), embedding_scale(embedding, spec.dtype)
    head = fused_model.unembed
    window_array = (ctypes.c_int64 * len(windows))(*windows)
    model = structs.ModelStruct(
        structs.DTYPE_CODES[spec.dtype_name],
        spec.hidden_size,
        spec.vocab_size,
        len(layers),
        len(windows),
        layers,
        window_array,
        builder.build_norm(fused_model.norm),
        builder.build_matrix(fused_model.unembed),
        rows_ptr,
        panel_structs,
        scale,
        structs.ACTIVATION_CODES[head.activations] if isinstance(head, PanelLinear) else 0,
        structs.KV_CODES[split_kv_cache_dtype(spec.quantization)[1]],
    )
    return model, [*builder.keepalive, layers, window_array, embedding]
