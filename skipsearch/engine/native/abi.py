"""The plain structs of src/abi.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from typing import Any

PANEL = 32                     # output rows that lie side by side
SCALED = 32                    # inputs that share a scale, in 8 bits
SCALE_BYTES = 2 * PANEL        # of a block's scales
BLOCK_BYTES = SCALE_BYTES + SCALED * PANEL
DTYPES = {"float32": 0, "bfloat16": 1, "float64": 2}
AS_DTYPE, EIGHT_BITS = range(2)   # kinds of matrices
SILU, GELU_TANH, GELU = range(3)


class Matrix(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("out", c_int64), ("in", c_int64), ("kind", c_int64))


class Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_double), ("width", c_int64))


class Layer(ctypes.Structure):
    _fields_ = (*((name, Norm) for name in ("attn_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")),
                *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
                *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "window", "table", "act")), ("scale", c_double))


class Model(ctypes.Structure):
    _fields_ = (*((name, c_int64) for name in ("dtype", "hidden", "vocab", "n_layers", "n_windows")), ("layers", POINTER(Layer)),
                ("windows", POINTER(c_int64)), ("norm", Norm), ("head", Matrix), ("embedding", c_void_p), ("embed_scale", c_double))


class Table(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("width", c_int64), ("length", c_int64))


class Pass(ctypes.Structure):
    held: list[Any]   # what it points to

    _fields_ = (*((name, c_void_p) for name in ("tokens", "hidden", "hidden_out", "logits", "choice", "confidence")),
                *((name, c_int64) for name in ("batch", "rows", "first", "last", "last_only")), ("skip", c_void_p),
                ("positions", c_void_p), ("positions_step", c_int64), ("slots", c_void_p), ("slots_step", c_int64),
                ("visible", c_void_p), ("visible_step", c_int64), ("visible_row", c_int64),
                ("key_positions", c_void_p), ("key_positions_step", c_int64), ("keys", c_int64), ("capacity", c_int64),
                ("k", c_void_p), ("v", c_void_p), ("tables", c_void_p), ("threads", c_int64))


class Product(ctypes.Structure):
    _fields_ = (("matrix", POINTER(Matrix)), ("x", c_void_p), ("y", c_void_p), ("rows", c_int64), ("threads", c_int64))
