"""What `skipsearch doctor --model` says of a model: what it was read as, what was checked, what drives it, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipsearch.models.spec import ModelAdapter


def looked_at(named: str, device: str, dtype: str) -> dict[str, str]:
    """A line for each question. named: as `--model` has it. Raises: ModelError."""
    from skipsearch.engine import load_model
    from skipsearch.models.checked import kept_finding

    model = load_model(named, device=device, dtype=dtype)
    found = kept_finding(model.spec)
    return {
        "model": str(model.spec),
        "read as": getattr(model, "description", f"by the row {model.spec.family} of the table of families"),
        "checked": str(found) if found else "nothing: its weights are random, or the result could not be kept",
        "engine": _engine(model),
        "memory": f"{model.weight_bytes / 2**20:,.0f} MiB of weights, {model.read_bytes / 2**20:,.0f} MiB of them read for each token",
        "context": f"{model.spec.context:,} tokens" if model.spec.context else "it names none",
        "chat template": _template(model),
        "next": f"skipsearch tune --model {named} --task pycode, or your own prompts.jsonl",
    }


def _engine(model: ModelAdapter) -> str:
    """What `--engine auto` takes here, and why nothing faster. Builds nothing."""
    from skipsearch.engine import native_is_wanted
    from skipsearch.engine.native import why_not_here
    from skipsearch.models.hf import HFAdapter
    from skipsearch.models.lean import LeanAdapter, why_not
    from skipsearch.models.own import OwnAdapter

    if isinstance(model, OwnAdapter):
        return f"hf: {model.spec.family} models have no row in the table of families, so their own forward drives them"
    if isinstance(model, HFAdapter):
        config = model.model.config
        return f"hf: lean, native and graph cannot, since {why_not(config, model.spec.quantization, model.spec.n_devices)}"
    if model.spec.device.type != "cpu":
        return "graph (CUDA graphs) where it is faster than lean, which is measured when the model is loaded"
    if not native_is_wanted():
        return "lean: SKIPSEARCH_NATIVE=0 forbids native"
    reason = why_not_here(model) if isinstance(model, LeanAdapter) else None
    return "native (C++, built once for this CPU)" if reason is None else f"lean; native cannot: {reason}"


def _template(model: ModelAdapter) -> str:
    if model.tokenizer is None:
        return "it has no tokenizer, so it takes token ids only"
    return "it has one, for tasks and chat that ask for it" if getattr(model.tokenizer, "chat_template", None) else "it has none"
