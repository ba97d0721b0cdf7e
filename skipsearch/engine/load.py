"""Engines by name, and `load_model`: a model together with the engine that drives it."""

from __future__ import annotations

from collections.abc import Callable

from skipsearch import models
from skipsearch.errors import ModelError
from skipsearch.models.hf import HFAdapter
from skipsearch.models.lean import LeanAdapter, why_not
from skipsearch.models.place import pick_device
from skipsearch.models.quantize import NATIVE
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
               engine: str = "auto", progress: Callable[[int, int], None] = lambda done, total: None,
               settled: bool = True) -> ModelAdapter:
    """As `skipsearch.models.load_adapter`, driven by an engine of `ENGINES`. auto takes native where a command or engine="native" built
    it on this machine before, else lean where it applies, and hf elsewhere. It builds and measures nothing.

    quantization native-8bit is the engine native's, which it builds: weights of 8 bits and activations in `dtype`, on a CPU.
    settled: False keeps auto to lean and hf, for a caller that asks `engine.fastest` or `engine.ready` for another, as the commands do.
    progress(done, total): of files compiled.
    Raises: ModelError for an unknown engine, or one that cannot drive this model here.
    """
    engine = current(engine)
    if engine not in ("auto", *ENGINES):
        raise ModelError(f"{unknown('engine', engine, ENGINES)}; or auto")
    if quantization == NATIVE:
        return _in_eight_bits(name, device, dtype, engine, progress)
    model = driven(models.load_adapter(name, device, dtype, quantization, engine), engine, progress)
    if engine == "auto" and settled:
        from skipsearch.engine.choice import native_is_wanted, ready

        return (ready(model, "native") if native_is_wanted() else None) or model
    return model


def _in_eight_bits(name: str, device: str, dtype: str, engine: str, progress: Callable[[int, int], None]) -> ModelAdapter:
    """Raises: ModelError."""
    from skipsearch.engine.native import eight_bit_model

    if engine not in ("auto", "native"):
        raise ModelError(f"quantization {NATIVE} is run by the engine native alone, and not by {engine}: leave that engine out, or the "
                         "quantization")
    if (place := pick_device(device)).type != "cpu":   # before a download
        raise ModelError(f"quantization {NATIVE} is for CPUs, and not for {place}: use --device cpu, or another quantization")
    found = models.load_adapter(name, device, dtype)
    if not isinstance(found, LeanAdapter):
        config = found.model.config if isinstance(found, HFAdapter) else None
        reason = why_not(config, found.spec.quantization, found.spec.n_devices) if config else \
            f"{found.spec.family} models have no row in the table of families"
        raise ModelError(f"quantization {NATIVE} is for models that the engine native drives, and {found.spec.id} is none of them: "
                         f"{reason}; leave it out")
    return eight_bit_model(found, progress)


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
