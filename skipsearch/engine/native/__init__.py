"""The native engine: C++ kernels for CPUs, built on first use."""

from __future__ import annotations

import warnings
from contextlib import suppress

from skipsearch.engine.native.adapter import NativeAdapter, in_its_layout, why_not
from skipsearch.engine.native.library import NoCompiler, Progress, compiler_here, kept_library, open_library
from skipsearch.errors import ModelError, OtherEngine
from skipsearch.models.lean import LeanAdapter
from skipsearch.models.quantize import NATIVE

__all__ = ["NativeAdapter", "eight_bit_model", "kept_library", "native_model", "prepare", "ready_model", "why_not", "why_not_here"]


def native_model(lean: LeanAdapter, progress: Progress = lambda done, total: None) -> NativeAdapter | LeanAdapter:
    """The model under the native engine, which takes its weights over; as it is, with an `OtherEngine` warning, where that cannot be.

    progress(done, total): of files compiled, on first use. Raises: ModelError where the library cannot be kept or loaded.
    """
    reason = why_not(lean)
    if reason is None:
        try:
            return in_its_layout(lean, open_library(progress))
        except NoCompiler as error:
            warnings.warn(OtherEngine(f"{error}; until then the engine lean takes its place"), stacklevel=2)
            return lean
    warnings.warn(OtherEngine(f"the engine native cannot drive {lean.spec.id}: {reason}; the engine lean takes its place"), stacklevel=2)
    return lean


def eight_bit_model(lean: LeanAdapter, progress: Progress = lambda done, total: None) -> NativeAdapter:
    """The model with weights of 8 bits, which takes the place of its own. Raises: ModelError where there is none, since nothing else is the
    same model."""
    if (reason := why_not(lean)) is not None:
        raise ModelError(f"quantization {NATIVE} cannot be had of {lean.spec.id}, since the engine native cannot drive it: {reason}")
    return in_its_layout(lean, open_library(progress), eight_bits=True)


def ready_model(lean: LeanAdapter) -> NativeAdapter | None:
    """The model under the native engine, which takes its weights over, where the library was built before; None otherwise."""
    if why_not(lean) is not None or (built := kept_library()) is None:
        return None
    return in_its_layout(lean, built)


def why_not_here(lean: LeanAdapter) -> str | None:
    """What keeps `auto` from this engine here, as half a sentence; None if nothing does: it was built, or a compiler was found. Builds
    nothing."""
    reason = why_not(lean)
    if reason is None and kept_library() is None and compiler_here() is None:
        return "there is no C++ compiler: install g++"
    return reason


def prepare(model: object, progress: Progress) -> None:
    """Builds the library for a model that it can drive, so that `ready_model` finds it. Where it cannot be built nothing is said."""
    if isinstance(model, LeanAdapter) and why_not(model) is None and kept_library() is None:
        with suppress(ModelError):
            open_library(progress)
