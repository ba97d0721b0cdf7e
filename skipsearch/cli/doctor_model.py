"""The report of `skipsearch doctor --model` on a model.

It says how the model is read, what was checked, which engine runs it, and what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipsearch.models.adapter import ModelAdapter, ModelSpec

NATIVE = "native (C++, built once for this CPU)"


def describe_model(
    model_name: str, device: str, dtype: str, draft_model: str | None = None
) -> dict[str, str]:
    """Return one line for each question about a model.

    model_name: as for `--model`. draft_model: the name of a smaller model that may draft for it.

    Raises: ModelError.
    """
    from skipsearch.engine import load_model
    from skipsearch.engine.native import cached_library
    from skipsearch.models.stored_checks import load_check_result

    model = load_model(model_name, device=device, dtype=dtype, allow_native=False)
    library = cached_library() if model.spec.engine == "native" else None
    check = load_check_result(model.spec, library.sha256 if library else "")
    task = "pycode, or prompts.jsonl"
    if _has_template(model):
        task = "chat, or --task prompts.jsonl --chat"
    narrower = _name_narrower_dtype(model_name, model.spec) if dtype == "auto" else None
    return {
        "model": str(model.spec),
        "read as": getattr(
            model, "description", f"by the row {model.spec.family} of the table of families"
        ),
        "checked": str(check)
        if check
        else "nothing: its weights are random, or the result could not be kept",
        "engine": _describe_engine(model),
        "memory": f"{model.weight_bytes / 2**20:,.0f} MiB of weights, "
        f"{model.read_bytes / 2**20:,.0f} MiB of them read for each token"
        + (f"; half of that with --dtype {narrower}: the files hold 16 bits" if narrower else ""),
        **_describe_experts(model),
        "context": f"{model.spec.context_length:,} tokens"
        if model.spec.context_length
        else "it names none",
        "chat template": _describe_template(model),
        "draft head": _describe_draft_head(model_name, model.spec),
        **({} if draft_model is None else _describe_draft_model(draft_model, model)),
        "next": f"skipsearch tune --model {model_name} "
        f"{f'--dtype {narrower} ' if narrower else ''}--task {task}",
    }


def _name_narrower_dtype(model_name: str, spec: ModelSpec) -> str | None:
    """Return bfloat16 if a checkpoint is stored in 16 bits and computed in float32; else None.

    A CPU computes in float32 by default.
    """
    from skipsearch.models import synthetic
    from skipsearch.models.loading.gguf_model import is_gguf
    from skipsearch.models.loading.hub import DEMO_FOLDER, resolve_model
    from skipsearch.models.loading.model_files import find_model_file
    from skipsearch.models.loading.weight_files import read_config

    is_file = is_gguf(find_model_file(model_name))
    has_config = not is_file and not synthetic.is_synthetic(model_name)
    if spec.dtype_name != "float32" or not has_config:
        return None
    folder, _, _ = resolve_model(model_name)
    if folder == DEMO_FOLDER:  # its profiles are for float32
        return None
    config = read_config(folder, model_name)
    text = config.get("text_config", config)
    stored = {part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")}
    return "bfloat16" if stored & {"bfloat16", "float16"} else None


def _describe_draft_head(model_name: str, spec: ModelSpec) -> str:
    """Return whether the checkpoint ships draft heads, and how to get one."""
    from skipsearch.models.loading.shipped_heads import can_load_head, ships_draft_head

    if not ships_draft_head(model_name, spec.n_layers):
        advice = "`skipsearch train mtp` makes one, in about 30 minutes for a small model on a CPU"
        return f"it ships none; {advice}"
    if can_load_head(spec.family):
        return "it ships MTP heads: `tune` weighs the first with all other drafts"
    return f"it ships MTP heads, which skipsearch does not read for {spec.family} models"


def _describe_draft_model(name: str, model: ModelAdapter) -> dict[str, str]:
    """Return a line about a second model that drafts. Raises: ModelError if it cannot."""
    from skipsearch.decoding.draft_models import load_draft_model
    from skipsearch.drafters.draft_model.shared_tokens import match_tokens

    draft_model = load_draft_model(name, model)
    tokens = match_tokens(draft_model, model)
    order = "" if tokens.full_ids is None else ", under another order"
    sizes = draft_model.weight_bytes / 2**20, 100 * draft_model.read_bytes / model.read_bytes
    return {
        "draft model": f"{draft_model.spec}, engine {draft_model.spec.engine}: {tokens.count:,} "
        f"shared tokens{order}; {sizes[0]:,.0f} MiB of weights besides the model's, and for each "
        f"token {sizes[1]:.0f} % of what the model reads"
    }


def _describe_experts(model: ModelAdapter) -> dict[str, str]:
    """Return a line about the experts of a model; {} if it has none."""
    from skipsearch.models.families.unmodified import experts_of

    if (experts := experts_of(model)) is None:
        return {}
    share = model.read_bytes / model.weight_bytes
    return {"experts": f"it {experts}, and {100 * share:.0f} % of its weights"}


def _describe_engine(model: ModelAdapter) -> str:
    """Return the engine that `--engine auto` takes here, and why no faster one runs.

    This does not build a library.
    """
    from skipsearch.engine import is_native_allowed
    from skipsearch.engine.native import why_unavailable
    from skipsearch.models.families.hf_adapter import HFAdapter
    from skipsearch.models.families.unmodified import UnmodifiedModel
    from skipsearch.models.fused.fused_adapter import FusedAdapter, why_not_fusable
    from skipsearch.models.generic.generic_adapter import GenericAdapter

    if model.spec.engine == "native":  # the only engine for weights in blocks
        is_whole = not isinstance(model, UnmodifiedModel)
        return (
            NATIVE if is_whole else f"{NATIVE} for matrices, modules of transformers for the rest"
        )
    if isinstance(model, GenericAdapter):
        return (
            f"hf: {model.spec.family} models have no row in the table of families, so their own "
            "forward drives them"
        )
    if isinstance(model, HFAdapter):
        config = model.model.config
        reason = why_not_fusable(config, model.spec.quantization, model.spec.n_devices)
        return f"hf: lean, native and graph cannot, since {reason}"
    if model.spec.device.type != "cpu":
        return (
            "graph (CUDA graphs) where it is faster than lean, which is measured when the model is "
            "loaded"
        )
    if not is_native_allowed():
        return "lean: SKIPSEARCH_NATIVE=0 forbids native"
    reason = why_unavailable(model) if isinstance(model, FusedAdapter) else None
    return NATIVE if reason is None else f"lean; native cannot: {reason}"


def _describe_template(model: ModelAdapter) -> str:
    """Return a sentence about the model's chat template."""
    if model.tokenizer is None:
        return "it has no tokenizer, so it takes token ids only"
    return (
        "it has one, for tasks and chat that ask for it" if _has_template(model) else "it has none"
    )


def _has_template(model: ModelAdapter) -> bool:
    return bool(getattr(model.tokenizer, "chat_template", None))
