"""Load a model together with the engine that runs it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from skipsearch import models
from skipsearch.core.registry import unknown_name
from skipsearch.engine import native
from skipsearch.engine.engines import ENGINES, is_native_allowed, switch_engine, wrap_engine
from skipsearch.errors import ModelError, UnpackedWeightsWarning
from skipsearch.models.activations import DEFAULT_KV_CACHE_DTYPE
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.families.decompose import decompose_model
from skipsearch.models.fused.fused_adapter import FusedFrom
from skipsearch.models.loading.gguf_file import list_parts
from skipsearch.models.loading.gguf_model import find_gguf, is_gguf, open_gguf
from skipsearch.models.loading.loaded_model import LoadedModel
from skipsearch.models.loading.loader import open_model, why_not_fused
from skipsearch.models.loading.model_files import find_model_file
from skipsearch.models.loading.placement import in_gb, pick_device, pick_dtype
from skipsearch.models.loading.quantize import (
    GGUF,
    NATIVE_QUANTIZATIONS,
    is_native_quantization,
    join_rounding,
    split_activations,
    split_kv_cache_dtype,
)
from skipsearch.models.loading.weight_files import hash_weight_files
from skipsearch.models.stored_linear import list_stored_matrices


def load_model(
    name: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    engine: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
    allow_native: bool = True,
    activations: str | None = None,
    weight_cache: native.WeightCache | None = None,
    kv_cache_dtype: str | None = None,
) -> ModelAdapter:
    """Load a model as `skipsearch.models.load_adapter` does, on an engine of `ENGINES`.

    engine: auto is native if a command or engine="native" built it on this machine before.
    Otherwise it is lean if lean supports the model, else hf. auto builds and measures nothing.
    quantization: native-8bit, -6bit, -5bit and -4bit need the engine native and build it; they are
    for CPUs.
    activations: int8 (the default) and int16 round the inputs of quantised matrices in the engine
    native; float does not.
    progress(done, total): numbers of compiled files.
    allow_native: False limits auto to lean and hf. It is for a caller that picks the engine later
    with `pick_fastest` or `switch_engine`, as the commands do.
    weight_cache: where the packed weights of a GGUF file are stored, so that it loads faster the
    next time; None: they are not stored.
    kv_cache_dtype: int8 stores K/V of quantised models in 8 bits, in the engine native; auto, the
    default, in the model's dtype.
    A GGUF file, whatever its name, keeps its numbers in the engine native, and is unpacked for
    other engines.
    Raises: ModelError for an unknown engine, or one that cannot run this model here.
    """
    if engine not in ("auto", *ENGINES):
        raise ModelError(f"{unknown_name('engine', engine, ENGINES)}; or auto")
    rounding = join_rounding(quantization, activations, kv_cache_dtype)
    _, kv_cache_dtype = split_kv_cache_dtype(rounding)
    quantization, activations = split_activations(rounding, None)
    name = find_model_file(name)
    if quantization is not None and quantization.startswith(GGUF) and not is_gguf(name):
        if quantization == GGUF:
            raise ModelError(
                f"activations and K/V are rounded if weights are quantised, and {name} is no GGUF "
                "file: add --quantization native-8bit or its like, or leave --activations and "
                "--kv-cache-dtype out"
            )
        quantization = None  # of the file that a profile was measured with
    model: ModelAdapter
    if is_gguf(name):
        model = _load_gguf(
            name, device, dtype, engine, progress, quantization, activations, weight_cache
        )
    elif quantization in NATIVE_QUANTIZATIONS:
        model = _load_quantized(name, device, dtype, engine, progress, quantization, activations)
    else:
        model = wrap_engine(
            models.load_adapter(name, device, dtype, quantization, engine), engine, progress
        )
        if engine == "auto" and allow_native and is_native_allowed():
            model = switch_engine(model, "native") or model
    if kv_cache_dtype != DEFAULT_KV_CACHE_DTYPE:
        _use_kv_cache_dtype(model, kv_cache_dtype)
    return model


def _use_kv_cache_dtype(model: ModelAdapter, kv_cache_dtype: str) -> None:
    """Set how a model stores K/V. Raises: ModelError if its engine cannot."""
    if not (
        isinstance(model, native.NativeAdapter) and is_native_quantization(model.spec.quantization)
    ):
        raise ModelError(
            f"K/V are stored in {kv_cache_dtype} by the engine native alone, for quantised weights "
            f"of families that it runs whole, and {model.spec.id} runs on {model.spec.engine} with "
            f"{model.spec.quantization or 'plain'} weights: leave --kv-cache-dtype out"
        )
    model.use_kv_cache_dtype(kv_cache_dtype)


def load_for_switching(
    name: str,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = None,
    engine: str = "auto",
    preferred_engine: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    weight_cache: native.WeightCache | None = None,
) -> ModelAdapter:
    """Load a model; for engine auto, `switch_engine` or `pick_fastest` chooses its engine then.

    preferred_engine: the engine that will be asked for, if that is known. native, which is also
    expected if no engine is known, is built here if it can be.
    Other arguments and errors are those of `load_model`.
    """
    # Weights in blocks have another form, which engine hf cannot run.
    load_as_hf = (engine, preferred_engine) == ("auto", "hf") and not is_native_quantization(
        quantization
    )
    model = load_model(
        name,
        device,
        dtype,
        quantization,
        "hf" if load_as_hf else engine,
        progress,
        allow_native=False,
        weight_cache=weight_cache,
    )
    if engine == "auto" and preferred_engine in (None, "native") and is_native_allowed():
        native.prebuild(model, progress)
    return model


def _load_quantized(
    name: str,
    device: str,
    dtype: str,
    engine: str,
    progress: Callable[[int, int], None],
    quantization: str,
    activations: str,
) -> ModelAdapter:
    if engine not in ("auto", "native"):
        raise ModelError(
            f"quantization {quantization} is run by the engine native alone, and not by {engine}: "
            "leave that engine out, or the quantization"
        )
    place = pick_device(device)  # before a download
    if place.type != "cpu":
        raise ModelError(
            f"quantization {quantization} is for CPUs, and not for {place}: use --device cpu, or "
            "another quantization"
        )
    loaded = open_model(name, device, dtype, quantization)
    if (reason := why_not_fused(loaded.model, loaded.spec, loaded.family)) is not None:
        raise ModelError(
            f"quantization {quantization} is for models that the engine native drives, and "
            f"{loaded.spec.id} is not one: {reason}; leave it out"
        )
    return native.to_native_quantized(
        loaded, quantization, NATIVE_QUANTIZATIONS[quantization], activations, progress
    )


def _load_gguf(
    name: str,
    device: str,
    dtype: str,
    engine: str,
    progress: Callable[[int, int], None],
    quantization: str | None,
    activations: str,
    weight_cache: native.WeightCache | None,
) -> ModelAdapter:
    place = pick_device(device)
    if quantization is not None and not quantization.startswith(GGUF):
        raise ModelError(
            f"{name} holds quantised weights, which are not quantised again: leave quantization "
            f"{quantization} out"
        )
    if engine not in ("auto", "native") or place.type != "cpu":
        return wrap_engine(models.load_adapter(name, device, dtype, None, engine), engine, progress)
    number_format = pick_dtype(dtype, place)
    paths = list_parts(find_gguf(name))
    if weight_cache is not None and all(part.is_file() for part in paths):
        cached = weight_cache.load(
            hash_weight_files(paths),
            number_format,
            activations,
            lambda: _read_origin(name, number_format),
        )
        if cached is not None:
            return cached
    loaded = open_gguf(name, number_format)
    if why_not_fused(loaded.model, loaded.spec, loaded.family) is not None:
        try:
            return native.to_native_modules(loaded, activations, progress)
        except native.NoCompilerError:
            if engine == "native":
                raise
        _warn_of_unpacking(loaded)
        return models.load_adapter(name, device, dtype, None, engine)
    if weight_cache is None:
        return native.to_native_stored(loaded, activations, progress)
    with warnings.catch_warnings(record=True) as caught:
        model = native.to_native_stored(loaded, activations, progress)
    for note in caught:
        warnings.warn_explicit(note.message, note.category, note.filename, note.lineno)
    weight_cache.store(
        model, [note.message for note in caught if isinstance(note.message, Warning)]
    )
    return model


def _warn_of_unpacking(loaded: LoadedModel) -> None:
    """Warn if weights take more memory on the engine hf than they take in their file."""
    spec, matrices = loaded.spec, list_stored_matrices(loaded.model)
    stored_bytes = sum(matrix.data.nbytes for matrix in matrices)
    memory_bytes = sum(math.prod(matrix.shape) for matrix in matrices) * spec.dtype.itemsize
    if memory_bytes <= stored_bytes:
        return
    warnings.warn(
        UnpackedWeightsWarning(
            f"{spec.id} is run by the engine hf, since {spec.family} models have no kernels of "
            f"their own: its weights are unpacked to {spec.dtype_name}, {in_gb(memory_bytes)} "
            f"instead of {in_gb(stored_bytes)} in the file"
        ),
        stacklevel=4,
    )


def _read_origin(name: str, dtype: torch.dtype) -> FusedFrom:
    """Return what a fused model keeps of its modules, from its file."""
    loaded = open_gguf(name, dtype)
    rotary = decompose_model(loaded.model, loaded.family).rotary
    return FusedFrom(loaded.model.config, loaded.family, rotary)
