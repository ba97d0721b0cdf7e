"""Engines by name, and the functions that put a loaded model under an engine."""

from __future__ import annotations

import os
from collections.abc import Callable

from skipsearch.engine import cuda_graph, native
from skipsearch.errors import ModelError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.loading.placement import in_gb
from skipsearch.models.memory import memory_errors_reported

ENGINES: dict[str, str] = {
    "hf": "the unmodified Hugging Face modules, any family",
    "lean": "fused weights and a few kernels a sub-layer, Llama-shaped families",
    "native": "one call of C++ a pass over the weights of lean, built once for this CPU; "
    "in GGUF files of other families, products of matrices",
    "graph": "lean, its passes recorded once as CUDA graphs",
}


def wrap_engine(
    model: ModelAdapter,
    engine: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ModelAdapter:
    """Return a fused model on another engine; return a model that is not fused unchanged.

    progress(done, total): numbers of compiled files.
    Raises: ModelError if the engine cannot run the model.
    """
    if not isinstance(model, FusedAdapter) or engine not in ("graph", "native"):
        return model
    if engine == "native":
        return native.to_native(model, progress)
    if model.spec.device.type != "cuda":
        raise ModelError(
            f"the engine graph records CUDA graphs and {model.spec.id} is on {model.spec.device}: "
            "use --device cuda, or "
            "--engine lean"
        )
    if model.experts is not None:
        raise ModelError(
            f"the engine graph records passes, and {model.spec.id} chooses experts while a pass "
            "runs: use --engine lean"
        )
    device = model.spec.device
    with memory_errors_reported(
        device,
        lambda free: (
            f"{model.spec.id} ran out of memory while the engine graph recorded its passes, and "
            f"{device} has {in_gb(free)} free: use --engine lean"
        ),
    ):
        return cuda_graph.graph_model(model)


def switch_engine(model: ModelAdapter, engine: str) -> ModelAdapter | None:
    """Return the model on another engine, or None.

    None: the switch needs a compiler, or a second copy of the weights.
    native takes over the weights of `model`. `model` can still run, but more slowly than before.
    Raises: ModelError if the engine computes other logits than `model`; torch.OutOfMemoryError.
    """
    if model.spec.engine == engine:
        return model
    if not isinstance(model, FusedAdapter):
        return None
    if engine == "graph" and model.spec.device.type == "cuda" and model.experts is None:
        return cuda_graph.graph_model(model)
    if engine == "native":
        return native.to_native_if_built(model)
    return None


def is_native_allowed() -> bool:
    """Return whether `auto` may pick and build native; SKIPSEARCH_NATIVE=0 forbids it."""
    return os.environ.get("SKIPSEARCH_NATIVE") != "0"
