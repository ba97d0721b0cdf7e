"""The native engine: C++ kernels for CPUs, built on first use."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

from skipsearch.engine.native.block_formats import find_block_format
from skipsearch.engine.native.build import (
    BuildProgress,
    NativeLibrary,
    NoCompilerError,
    cached_library,
    find_compiler,
    load_or_build,
)
from skipsearch.engine.native.native_adapter import NativeAdapter
from skipsearch.engine.native.packed_modules import pack_stored_modules
from skipsearch.engine.native.panels import PanelPacker
from skipsearch.engine.native.recurrent_net import replace_recurrent_nets
from skipsearch.engine.native.repack import repack_weights, warn_if_threads_spin, why_not_native
from skipsearch.engine.native.rounded import round_matrices_when_read
from skipsearch.engine.native.structs import DTYPE_CODES, PANEL_ROWS
from skipsearch.engine.native.weight_cache import WeightCache
from skipsearch.errors import EngineFallbackWarning, ModelError, UnpackedWeightsWarning
from skipsearch.models.activations import DEFAULT_ACTIVATIONS
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.check import CheckableAdapter
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.fused.fused_adapter import FusedAdapter, fuse_model
from skipsearch.models.loading.loaded_model import LoadedModel
from skipsearch.models.loading.placement import in_gb
from skipsearch.models.loading.quantize import name_with_activations
from skipsearch.models.memory import free_memory, memory_errors_reported
from skipsearch.models.stored_linear import list_stored_matrices

__all__ = [
    "NativeAdapter",
    "NoCompilerError",
    "WeightCache",
    "cached_library",
    "prebuild",
    "to_native",
    "to_native_if_built",
    "to_native_modules",
    "to_native_quantized",
    "to_native_stored",
    "why_not_native",
    "why_unavailable",
]


def to_native(
    fused_model: FusedAdapter, progress: BuildProgress = lambda done, total: None
) -> NativeAdapter | FusedAdapter:
    """Return the model on the native engine, which takes over its weights.

    If the engine cannot run the model, warn with `EngineFallbackWarning` and return the model
    unchanged.

    progress(done, total): is called with numbers of compiled files, if the library is built.
    Raises: ModelError if the library cannot be stored or loaded, or computes other logits than
    `fused_model`.
    """
    reason = why_not_native(fused_model)
    if reason is None:
        try:
            return _repack_checked(fused_model, load_or_build(progress))
        except NoCompilerError as error:
            warnings.warn(
                EngineFallbackWarning(f"{error}; until then the engine lean takes its place"),
                stacklevel=2,
            )
            return fused_model
    warnings.warn(
        EngineFallbackWarning(
            f"the engine native cannot drive {fused_model.spec.id}: {reason}; the engine lean "
            "takes its place"
        ),
        stacklevel=2,
    )
    return fused_model


def to_native_quantized(
    loaded: LoadedModel,
    quantization: str,
    bits: int,
    activations: str = DEFAULT_ACTIVATIONS,
    progress: BuildProgress = lambda done, total: None,
) -> NativeAdapter:
    """Return the model with its matrices in blocks of `bits` bits.

    Each matrix is rounded when it is packed, so that memory never holds a second copy of the model.
    quantization: the name of the quantization, without the activations.
    Raises: ModelError, as `to_native_stored`.
    """
    round_matrices_when_read(loaded.model, bits, loaded.spec.dtype)
    spec = replace(loaded.spec, quantization=quantization)
    return to_native_stored(replace(loaded, spec=spec), activations, progress)


def to_native_stored(
    loaded: LoadedModel,
    activations: str = DEFAULT_ACTIVATIONS,
    progress: BuildProgress = lambda done, total: None,
) -> NativeAdapter:
    """Return the native model. Its matrices keep the numbers with which they are stored.

    The model is checked against the modules of transformers, which read each matrix when they need
    it. The check computes with int16 activations instead of int8. In int8, a difference in the last
    bit may round an input to another number, which would hide a wrong weight. int16 runs the same
    kernels, and comes close to unrounded inputs.
    Raises: ModelError if the native engine cannot run the model (no other engine can run it,
    either), if it computes something else, or if memory runs out.
    """
    from skipsearch.models.stored_checks import check_engine  # which imports transformers

    name = name_with_activations(str(loaded.spec.quantization), activations)
    spec = replace(loaded.spec, quantization=name)
    fused_model = fuse_model(loaded.model, spec, loaded.family, loaded.tokenizer)
    if (reason := why_not_native(fused_model)) is not None:
        raise ModelError(
            f"{loaded.spec.quantization} weights of {spec.id} are run by the engine native alone, "
            f"which cannot drive this model: {reason}"
        )
    _warn_of_unpacked_weights(loaded)
    _refuse_what_does_not_fit(loaded)
    library = load_or_build(progress)

    def build() -> NativeAdapter:
        model = repack_weights(fused_model, library, activations)
        model.use_activations("int16" if activations == "int8" else activations)
        return model

    with memory_errors_reported(spec.device, lambda free: _out_of_memory(fused_model, free)):
        model = check_engine(
            replace(spec, engine="native"),
            lambda: HFAdapter(loaded.model, spec, loaded.family, loaded.tokenizer),
            build,
            library.sha256,
        )
    model.use_activations(activations)
    return model


def to_native_modules(
    loaded: LoadedModel,
    activations: str = DEFAULT_ACTIVATIONS,
    progress: BuildProgress = lambda done, total: None,
) -> ModelAdapter:
    """Return a model that transformers computes, with products of matrices by the kernels.

    It is for models whose layers are not fused. Matrices keep the numbers with which they are
    stored. Inputs are rounded to int16 instead of int8, because modules of transformers compute a
    row otherwise in the last bit if a pass has more rows, and a coarse rounding would make such a
    difference larger.
    The model is checked against its own forward, whose modules read each matrix when they need it.
    Raises: ModelError if the kernels do not know its dtype, if it computes something else, or if
    memory runs out; NoCompilerError.
    """
    from skipsearch.models.loading.loader import make_adapter
    from skipsearch.models.reference import record_reference
    from skipsearch.models.stored_checks import build_checked

    if activations == "int8":
        activations = "int16"
    name = name_with_activations(str(loaded.spec.quantization), activations)
    spec = replace(loaded.spec, quantization=name)
    if spec.dtype_name not in DTYPE_CODES:
        raise ModelError(
            f"the engine native computes in {', '.join(DTYPE_CODES)}, and not in "
            f"{spec.dtype_name}: use another --dtype, or --engine hf"
        )
    _warn_of_unpacked_weights(loaded)
    _refuse_what_does_not_fit(loaded)
    library = load_or_build(progress)
    warn_if_threads_spin()

    def build() -> CheckableAdapter:
        packer = PanelPacker(library, spec.dtype, activations)
        pack_stored_modules(loaded.model, packer)
        replace_recurrent_nets(loaded.model, library)
        hf_model: Any = loaded.model
        hf_model.stored_head.finish = lambda head: pack_stored_modules(head, packer)
        model = make_adapter(loaded.model, spec, loaded.family, loaded.tokenizer, "hf")
        model.spec = replace(model.spec, engine="native")
        return model

    with memory_errors_reported(
        spec.device,
        lambda free: (
            f"{spec.id} ran out of memory while the engine native packed its matrices, and this "
            f"machine has {in_gb(free)} free"
        ),
    ):
        return build_checked(
            replace(spec, engine="native"),
            lambda: record_reference(loaded.model, spec),
            build,
            library.sha256,
        )


def _warn_of_unpacked_weights(loaded: LoadedModel) -> None:
    """Warn if matrices take more bytes in memory than in their file, since a token reads them."""
    itemsize = loaded.spec.dtype.itemsize
    unpacked = [
        matrix
        for matrix in list_stored_matrices(loaded.model)
        if find_block_format(matrix.format) is None
        and matrix.data.nbytes < math.prod(matrix.shape) * itemsize
    ]
    if not unpacked:
        return
    stored_bytes = sum(matrix.data.nbytes for matrix in unpacked)
    memory_bytes = sum(math.prod(matrix.shape) * itemsize for matrix in unpacked)
    formats = ", ".join(sorted({matrix.format for matrix in unpacked}))
    warnings.warn(
        UnpackedWeightsWarning(
            f"the engine native has no kernel for {formats}: {len(unpacked)} matrices of "
            f"{loaded.spec.id} are computed in {loaded.spec.dtype_name}, so a token reads "
            f"{memory_bytes / 1e6:.0f} MB of them instead of {stored_bytes / 1e6:.0f} MB; a file "
            "in Q4_K_M, Q5_K_M or Q8_0 is faster"
        ),
        stacklevel=3,
    )


def _refuse_what_does_not_fit(loaded: LoadedModel) -> None:
    """Raise ModelError before matrices are packed that need more memory than there is."""
    spec, needed = loaded.spec, 0
    for matrix in list_stored_matrices(loaded.model):
        outputs, inputs = matrix.shape
        if (block_format := find_block_format(matrix.format)) is not None:
            needed += -(-outputs // PANEL_ROWS) * block_format.panel_nbytes(inputs)
        else:
            needed += outputs * inputs * spec.dtype.itemsize
    if needed > (free := free_memory(spec.device)):
        raise ModelError(
            f"{spec.id} needs {in_gb(needed)} for its weights on the engine native, and this "
            f"machine has {in_gb(free)} free: take a file with fewer bits a weight, a smaller "
            "model, or a larger machine"
        )


def to_native_if_built(fused_model: FusedAdapter) -> NativeAdapter | None:
    """Return the model on the native engine if the library was built before, else None.

    Return None also if the engine cannot run the model.

    Raises: ModelError if the engine computes other logits than `fused_model`.
    """
    if why_not_native(fused_model) is not None or (library := cached_library()) is None:
        return None
    return _repack_checked(fused_model, library)


def _repack_checked(fused_model: FusedAdapter, library: NativeLibrary) -> NativeAdapter:
    """Return the model in the native layout, after a check against `fused_model`.

    Raises: ModelError if the two compute different logits, or if memory runs out.
    """
    from skipsearch.models.stored_checks import check_engine  # which imports transformers

    spec = replace(fused_model.spec, engine="native")
    with memory_errors_reported(
        spec.device, lambda free: f"{_out_of_memory(fused_model, free)}: use --engine lean"
    ):
        return check_engine(
            spec, lambda: fused_model, lambda: repack_weights(fused_model, library), library.sha256
        )


def _out_of_memory(fused_model: FusedAdapter, free_bytes: int) -> str:
    spec = fused_model.spec
    return (
        f"{spec.id} ran out of memory while the engine native repacked its weights of "
        f"{in_gb(fused_model.weight_bytes)}, and this machine has {in_gb(free_bytes)} free"
    )


def why_unavailable(fused_model: FusedAdapter) -> str | None:
    """Return why `auto` cannot take this engine here, as a clause; None if it can.

    The library need not be built yet, and is not built by this call.
    """
    reason = why_not_native(fused_model)
    if reason is None and cached_library() is None and find_compiler() is None:
        return "there is no C++ compiler: install g++"
    return reason


def prebuild(model: object, progress: BuildProgress) -> None:
    """Build the library if it can run the model, so that `to_native_if_built` uses it later.

    A build that fails is not reported.
    """
    if (
        isinstance(model, FusedAdapter)
        and why_not_native(model) is None
        and cached_library() is None
    ):
        with suppress(ModelError):
            load_or_build(progress)
