"""Store the weights of a fused model as the native kernels read them."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import torch

from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.engine.native.int8 import int8_panels_nbytes, pack_int8_panels
from skipsearch.engine.native.model_struct import activation_code, embedding_scale, is_tied
from skipsearch.engine.native.native_adapter import NativeAdapter
from skipsearch.engine.native.panels import (
    HugePageArena,
    PanelLinear,
    TiedEmbedding,
    pack_panels,
    panels_nbytes,
)
from skipsearch.errors import SpinningThreads
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.linear import Linear
from skipsearch.models.loading.quantize import NATIVE_INT8


def why_not_native(fused_model: FusedAdapter) -> str | None:
    """Return what keeps a model from the native kernels, as half a sentence; None if nothing
    does.
    """
    if fused_model.spec.device.type != "cpu":
        return f"it is for CPUs and {fused_model.spec.id} is on {fused_model.spec.device}"
    if fused_model.spec.dtype_name not in structs.DTYPE_CODES:
        return (
            f"it computes in {', '.join(structs.DTYPE_CODES)} and {fused_model.spec.id} is in "
            f"{fused_model.spec.dtype_name}"
        )
    unknown = next((mlp.act for _, mlp in fused_model.layers if activation_code(mlp) is None), None)
    return (
        None
        if unknown is None
        else f"it has no activation {getattr(unknown, '__name__', None) or type(unknown).__name__}"
    )


def repack_weights(
    fused_model: FusedAdapter, library: NativeLibrary, as_int8: bool = False
) -> NativeAdapter:
    """Return the native model, whose weights `fused_model` shares from now on.

    Each matrix is stored in panels, and the old one is released at once.

    fused_model: a model that `why_not_native` has no objection to.
    as_int8: matrices become int8, and so does a tied embedding with the head. The model is then
        another one, and its spec says so. A separate embedding stays as it is: few of its rows are
        read.
    """
    warn_if_threads_spin()
    matrices = [
        (matrix, interleave)
        for attention, mlp in fused_model.layers
        for matrix, interleave in (
            (attention.qkv, 1),
            (attention.out, 1),
            (mlp.gate_up, 2),
            (mlp.down, 1),
        )
    ] + [(fused_model.unembed, 1)]
    arena = HugePageArena(
        sum(
            int8_panels_nbytes(matrix.shape, interleave)
            if as_int8
            else panels_nbytes(matrix.shape, interleave, fused_model.spec.dtype)
            for matrix, interleave in matrices
        )
    )
    del matrices

    def repack(matrix: Linear, interleave: int = 1) -> PanelLinear:
        return (pack_int8_panels if as_int8 else pack_panels)(
            matrix.to_dense(), matrix.bias, interleave, library, arena
        )

    for i, (attention, mlp) in enumerate(fused_model.layers):
        attention = replace(attention, qkv=repack(attention.qkv), out=repack(attention.out))
        # Store each half of a layer at once, so that peak memory stays low.
        fused_model.layers[i] = attention, mlp
        fused_model.layers[i] = (
            attention,
            replace(mlp, gate_up=repack(mlp.gate_up, 2), down=repack(mlp.down)),
        )
    embedding: Any = fused_model._embedding
    was_tied = is_tied(fused_model)
    fused_model.unembed = head = repack(fused_model.unembed)
    if was_tied:
        fused_model._embedding = TiedEmbedding(head, embedding_scale(embedding))
    if as_int8:
        fused_model.spec = replace(fused_model.spec, quantization=NATIVE_INT8)
    return NativeAdapter(fused_model, library)


def warn_if_threads_spin() -> None:
    """Warn with `SpinningThreads` if torch has several threads and OMP_WAIT_POLICY is not set.

    OpenMP reads it when torch is imported, so it is too late to set it here. The commands set it.
    """
    if torch.get_num_threads() > 1 and "OMP_WAIT_POLICY" not in os.environ:
        warnings.warn(
            SpinningThreads(
                "OMP_WAIT_POLICY is not set, so idle threads of torch take the cores from the "
                "engine native, and drafting is slow: set "
                "OMP_WAIT_POLICY=PASSIVE before torch is imported, or use one thread "
                "(torch.set_num_threads(1))"
            ),
            stacklevel=2,
        )
