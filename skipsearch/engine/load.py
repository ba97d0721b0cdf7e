"""Engines by name, and `load_model`: a model together with the engine that drives it."""

from __future__ import annotations

from collections.abc import Callable

from skipsearch import models
from skipsearch.errors import ModelError
from skipsearch.models.lean import LeanAdapter
from skipsearch.models.spec import ModelAdapter
from skipsearch.names import unknown

ENGINES: dict[str, str] = {
    "hf": "the unmodified Hugging Face modules, any family",
    "lean": "fused weights and a few kernels a sub-layer, Llama-shaped families",
    "native": "one call of C++ a pass over the weights of lean, built once for this CPU",
    "graph": "lean, its passes recorded once as CUDA graphs",
}
FORMER = {"compiled": "native"}   # engines that are gone, and which one took their place: profiles and scripts still name them


def current(engine: str) -> str:
    """The name of an engine today."""
    return FORMER.get(engine, engine)


def load_model(name: str, device: str = "auto", dtype: str = "auto", quantization: str | None = None,
               engine: str = "auto", progress: Callable[[int, int], None] = lambda done, total: None) -> ModelAdapter:
    """As `skipsearch.models.load_adapter`, driven by an engine of `ENGINES`; auto takes lean where it applies and hf elsewhere.

    `engine.fastest` compares what that gives with the other engines that are ready, as the commands do with --engine auto.
    progress(done, total): of files compiled.
    Raises: ModelError for an unknown engine, or one that cannot drive this model here.
    """
    engine = current(engine)
    if engine not in ("auto", *ENGINES):
        raise ModelError(f"{unknown('engine', engine, ENGINES)}; or auto")
    return driven(models.load_adapter(name, device, dtype, quantization, engine), engine, progress)


def driven(model: ModelAdapter, engine: str, progress: Callable[[int, int], None] = lambda done, total: None) -> ModelAdapter:
    """A fused model under an engine that builds on it; any other as it is. Raises: ModelError."""
    if not isinstance(model, LeanAdapter) or engine not in ("graph", "native"):
        return model
    if engine == "native":
        from skipsearch.engine.native import native_model

        return native_model(model, progress)
    from skipsearch.engine.graph import GraphAdapter

    if model.spec.device.type != "cuda":
        raise ModelError(f"the engine graph records CUDA graphs and {model.spec.id} is on {model.spec.device}: use --device cuda, or "
                         "--engine lean")
    return GraphAdapter(model)
