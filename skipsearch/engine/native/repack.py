"""Store the weights of a fused model as the native kernels read them."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch

from skipsearch.engine.native import structs
from skipsearch.engine.native.build import NativeLibrary
from skipsearch.engine.native.model_struct import activation_code, embedding_scale, is_tied
from skipsearch.engine.native.native_adapter import NativeAdapter
from skipsearch.engine.native.panels import HugePageArena, PanelEmbedding, PanelPacker
from skipsearch.errors import SpinningThreads
from skipsearch.models.activations import DEFAULT_ACTIVATIONS
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.linear import StoredFusedLinear
from skipsearch.models.fused.mlp import MLP, GatedActivation, SharedExpert
from skipsearch.models.stored_linear import StoredEmbedding


def why_not_native(fused_model: FusedAdapter) -> str | None:
    """Return why the native kernels cannot run a model, as a clause; None if they can."""
    if fused_model.spec.device.type != "cpu":
        return f"it is for CPUs and {fused_model.spec.id} is on {fused_model.spec.device}"
    if fused_model.spec.dtype_name not in structs.DTYPE_CODES:
        return (
            f"it computes in {', '.join(structs.DTYPE_CODES)} and {fused_model.spec.id} is in "
            f"{fused_model.spec.dtype_name}"
        )
    for _, mlp in fused_model.layers:
        sizes = fused_model.spec.hidden_size, mlp.down.shape[1]
        if mlp.routing is not None and any(size % structs.PANEL_ROWS for size in sizes):
            return (
                f"it takes experts whose sizes are multiples of {structs.PANEL_ROWS}, and those of "
                f"{fused_model.spec.id} are {sizes[0]} and {sizes[1]}"
            )
    for _, mlp in fused_model.layers:
        if isinstance(mlp.act, GatedActivation) and activation_code(mlp.act) is None:
            act = mlp.act.activation
            return f"it has no activation {getattr(act, '__name__', None) or type(act).__name__}"
    return None


def repack_weights(
    fused_model: FusedAdapter, library: NativeLibrary, activations: str = DEFAULT_ACTIVATIONS
) -> NativeAdapter:
    """Return the native model. `fused_model` shares its weights from now on.

    Each matrix is stored in panels, and the old one is released at once. Stored matrices keep the
    numbers of their file, or are rounded if they are `RoundedMatrix`.

    fused_model: a model for which `why_not_native` returns None.
    activations: how the inputs of matrices in blocks are rounded, one of ACTIVATIONS.
    """
    warn_if_threads_spin()
    dtype, embedding = fused_model.spec.dtype, fused_model._embedding
    table = None  # of an embedding that is in a file and not shared
    was_tied = is_tied(fused_model)
    if isinstance(embedding, StoredEmbedding) and not was_tied:
        table = StoredFusedLinear((embedding.matrix,), None, dtype)
    packer = PanelPacker(library, dtype, activations)
    n_bytes = sum(
        packer.nbytes(attention.qkv) + packer.nbytes(attention.out) + _mlp_nbytes(packer, mlp)
        for attention, mlp in fused_model.layers
    )
    n_bytes += sum(packer.nbytes(matrix) for matrix in (fused_model.unembed, table) if matrix)
    packer.arena = HugePageArena(n_bytes)
    pack = packer.pack
    for i, (attention, mlp) in enumerate(fused_model.layers):
        attention = replace(attention, qkv=pack(attention.qkv), out=pack(attention.out))
        # Store each half of a layer at once, so that peak memory stays low.
        fused_model.layers[i] = attention, mlp
        mlp = replace(mlp, gate_up=pack(mlp.gate_up, 2))
        fused_model.layers[i] = attention, mlp
        if mlp.routing is not None:
            mlp = replace(mlp, routing=replace(mlp.routing, router=pack(mlp.routing.router)))
        if (shared := mlp.shared) is not None:
            matrices = pack(shared.gate_up, 2), pack(shared.down), pack(shared.gate)
            mlp = replace(mlp, shared=SharedExpert(*matrices))
        fused_model.layers[i] = attention, replace(mlp, down=pack(mlp.down))
    fused_model.unembed = head = pack(fused_model.unembed)
    if was_tied or table is not None:
        fused_model._embedding = PanelEmbedding(
            head if table is None else pack(table), embedding_scale(embedding, dtype)
        )
    return NativeAdapter(fused_model, library)


def _mlp_nbytes(packer: PanelPacker, mlp: MLP) -> int:
    """Return the bytes that the matrices of an MLP take in panels."""
    n_bytes = packer.nbytes(mlp.gate_up, 2) + packer.nbytes(mlp.down)
    if mlp.routing is not None:
        n_bytes += packer.nbytes(mlp.routing.router)
    if (shared := mlp.shared) is not None:
        n_bytes += packer.nbytes(shared.gate_up, 2)
        n_bytes += packer.nbytes(shared.down) + packer.nbytes(shared.gate)
    return n_bytes


def warn_if_threads_spin() -> None:
    """Warn with `SpinningThreads` if torch has several threads and OMP_WAIT_POLICY is not set.

    OpenMP reads this variable when torch is imported, so it is too late to set it here. The
    commands set it.
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
