"""The structs and constants of src/abi.h, by the same names."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from typing import Any

PANEL_ROWS = 32  # output rows of a panel
GROUP_SIZE = 32  # inputs of a block
DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float64": 2}
DENSE = 0  # the kind of a panel in the model's dtype; other kinds are in blocks.py
ACTIVATION_CODES = {"int8": 0, "int16": 1, "float": 2}
KV_CODES = {"auto": 0, "int8": 1}
KV_GROUP = 32  # int8 numbers of K/V that share a scale
SILU, GELU_TANH, GELU, CLAMPED_SWIGLU = range(4)  # activations


class PanelStruct(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("kind", c_int64))


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        ("panels", POINTER(PanelStruct)),
        ("bias", c_void_p),
        ("out", c_int64),
        ("in", c_int64),
        ("has_blocks", c_int64),
    )


class NormStruct(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_double), ("width", c_int64))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, NormStruct)
            for name in (
                "attn_norm",
                "q_norm",
                "k_norm",
                "attn_post_norm",
                "mlp_norm",
                "mlp_post_norm",
            )
        ),
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *(
            (name, c_int64)
            for name in (
                "heads",
                "kv_heads",
                "head_dim",
                "window_index",
                "rotary_index",
                "activation",
            )
        ),
        ("alpha", c_double),
        ("limit", c_double),
        ("scale", c_double),
        ("query_factors", c_void_p),
        ("query_period", c_int64),
        ("sinks", c_void_p),
        ("router", MatrixStruct),
        *((name, c_int64) for name in ("n_experts", "experts_per_token", "normalizes")),
        *((name, MatrixStruct) for name in ("shared_gate_up", "shared_down", "shared_gate")),
    )


class ModelStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_int64)
            for name in ("dtype", "hidden_size", "vocab_size", "n_layers", "n_windows")
        ),
        ("layers", POINTER(LayerStruct)),
        ("windows", POINTER(c_int64)),
        ("norm", NormStruct),
        ("head", MatrixStruct),
        ("embedding", c_void_p),
        ("embedding_panels", POINTER(PanelStruct)),
        ("embed_scale", c_double),
        ("activations", c_int64),
        ("kv_format", c_int64),
    )


class RotaryTableStruct(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("width", c_int64), ("length", c_int64))


class InputMixStruct(ctypes.Structure):
    _fields_ = (
        ("embedding_norm", NormStruct),
        ("hidden_norm", NormStruct),
        ("projection", MatrixStruct),
    )


class SamplingStruct(ctypes.Structure):
    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("uniforms", c_void_p),
        ("probs", c_void_p),
    )


class PassArgs(ctypes.Structure):
    keepalive: list[Any]  # owners of the memory that the pointers point to

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("tokens", "hidden", "hidden_out", "logits", "choice", "confidence")
        ),
        *((name, c_int64) for name in ("batch", "rows", "first_layer", "end_layer", "last_only")),
        ("skip", c_void_p),
        ("positions", c_void_p),
        ("positions_batch_stride", c_int64),
        ("slots", c_void_p),
        ("slots_batch_stride", c_int64),
        ("visible", c_void_p),
        ("visible_batch_stride", c_int64),
        ("visible_row_stride", c_int64),
        ("key_positions", c_void_p),
        ("key_positions_batch_stride", c_int64),
        ("n_keys", c_int64),
        ("capacity", c_int64),
        ("k", c_void_p),
        ("v", c_void_p),
        ("rotary_tables", c_void_p),
        ("threads", c_int64),
        ("head", POINTER(MatrixStruct)),
        ("head_tokens", c_void_p),
        ("mix", POINTER(InputMixStruct)),
        ("sampling", POINTER(SamplingStruct)),
    )


class ProductArgs(ctypes.Structure):
    _fields_ = (
        ("matrix", POINTER(MatrixStruct)),
        ("x", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("threads", c_int64),
        ("activations", c_int64),
        ("n_parts", c_int64),
        ("first_rows", c_void_p),
    )


class ConvArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("mixed", "weight", "bias")),
        *(
            (name, c_int64)
            for name in ("batch", "rows", "channels", "columns", "kernel", "threads")
        ),
    )


class DeltaNetArgs(ctypes.Structure):
    _fields_ = (
        ("conv", ConvArgs),
        *(
            (name, c_void_p)
            for name in (
                "gates",
                "beta_logits",
                "steps",
                "step_biases",
                "decay_rates",
                "norm_weight",
            )
        ),
        ("norm_eps", c_double),
        ("states", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
    )


class MambaArgs(ctypes.Structure):
    _fields_ = (
        ("conv", ConvArgs),
        *((name, c_void_p) for name in ("steps", "step_biases")),
        *((name, c_double) for name in ("min_step", "max_step")),
        *((name, c_void_p) for name in ("decay_rates", "skips", "states", "out")),
        *((name, c_int64) for name in ("heads", "groups", "head_dim", "state_dim")),
    )


class ReadRowsArgs(ctypes.Structure):
    _fields_ = (
        ("matrix", POINTER(MatrixStruct)),
        ("rows", c_void_p),
        ("n_rows", c_int64),
        ("to", c_void_p),
    )


class CopyRowsArgs(ctypes.Structure):
    _fields_ = (
        ("from", POINTER(PanelStruct)),
        ("rows", c_void_p),
        ("n_rows", c_int64),
        ("in", c_int64),
        ("to", POINTER(PanelStruct)),
        ("first_row", c_int64),
        ("itemsize", c_int64),
    )


class QuantizeArgs(ctypes.Structure):
    _fields_ = (
        ("weights", c_void_p),
        ("n_blocks", c_int64),
        ("bits", c_int64),
        ("blocks", c_void_p),
    )


class PackArgs(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("is_unpacked", c_int64),
        ("n_panels", c_int64),
        ("in", c_int64),
        ("kind", c_int64),
        ("panels", c_void_p),
    )
