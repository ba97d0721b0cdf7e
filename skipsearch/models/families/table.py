"""The table of families: the modules of a Hugging Face model, and how its layers combine them.

A new family needs one row, keyed by the `model_type` of its config;
docs/extending.md has the steps.
If a path cannot express something, a small named function does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from skipsearch.errors import ModelError

# A dotted path, or a function that returns the module.
ModulePath = str | Callable[[nn.Module], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Family:
    """A row of the table. The defaults describe Llama.

    Llama computes h + attn(attn_norm(h)), then h + mlp(mlp_norm(h)). Dotted paths of the first
    group of fields start at `AutoModelForCausalLM`, those of the second group at a layer. None: the
    family has no such module. Fields whose names end in `_key` are keys of the config, which may
    lack them.
    """

    embed: ModulePath = "model.embed_tokens"
    embed_project: ModulePath | None = None  # between embedding and layers of another width
    positions: ModulePath | None = None  # learned position embeddings: [B, T] int64 -> [B, T, H]
    rotary: str | None = "model.rotary_emb"
    layers: str = "model.layers"
    norm: ModulePath | None = "model.norm"
    head_project: ModulePath | None = None
    head: ModulePath = "lm_head"

    attn: str = "self_attn"
    attn_norm: ModulePath | None = "input_layernorm"
    attn_post_norm: ModulePath | None = None  # of the branch, before it is added
    attn_sum_norm: ModulePath | None = None  # of the sum of branch and residual
    mlp: ModulePath = "mlp"
    mlp_norm: ModulePath | None = "post_attention_layernorm"
    mlp_post_norm: ModulePath | None = None
    mlp_sum_norm: ModulePath | None = None

    parallel: bool = False  # attention and MLP read the same h, and both outputs are added to it
    cache_argument: str = "past_key_values"  # the attention's name for the cache
    extra_arguments: Mapping[str, Any] | None = None  # of the attention, the same in every pass
    takes_positions: bool = False  # the attention has an argument position_ids
    rotary_takes_type: bool = False  # rotary(h, positions, layer type), not rotary(h, positions)
    # Whether an attention module applies RoPE; None: all of them do.
    uses_rope: Callable[[Any], bool] | None = None
    rope_interleaved: bool = False  # RoPE rotates pairs of neighbours instead of pairs of halves
    rotary_halves: bool = False  # the rotary module returns one angle for each pair
    alibi: bool = False  # a bias for each head, linear in the key's position
    # Layers that attend only to `sliding_window` tokens; typed: by config.layer_types.
    window_layers: Literal["none", "all", "typed"] = "none"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"  # to load the family with

    embed_scale_key: str | None = None  # × embeddings
    branch_scale_key: str | None = None  # × each branch before it is added
    logit_scale_key: str | None = None  # × logits
    logit_divisor_key: str | None = None  # logits ÷
    logit_cap_key: str | None = None  # cap · tanh(logits / cap)

    variant: Callable[[Any], Mapping[str, Any]] | None = None  # fields that depend on the config
    is_generic: bool = False  # a family without a row, for the generic adapter; no path is used


# Norms before and after each branch.
_SANDWICH = Family(
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    window_layers="typed",
    logit_cap_key="final_logit_softcapping",
)

# Norms after each branch only.
_POST_NORM = Family(
    attn_norm=None,
    attn_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def _nested(family: Family, prefix: str) -> Family:
    """Return the row for the text part of a model whose other inputs are not supported."""
    return replace(
        family,
        **{
            field: getattr(family, field).replace("model.", f"{prefix}.", 1)
            for field in ("embed", "rotary", "layers", "norm")
        },
    )


def _gpt_neox(config: Any) -> Mapping[str, Any]:
    return {"parallel": config.use_parallel_residual}


def _stablelm(config: Any) -> Mapping[str, Any]:
    return {"parallel": True, "mlp_norm": "input_layernorm"} if config.use_parallel_residual else {}


def _falcon(config: Any) -> Mapping[str, Any]:
    alibi = {"alibi": True, "rotary": None, "extra_arguments": None} if config.alibi else {}
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2:
        return {"parallel": True, "attn_norm": "ln_attn", "mlp_norm": "ln_mlp", **alibi}
    if config.new_decoder_architecture or config.parallel_attn:
        return {"parallel": True, "mlp_norm": "input_layernorm", **alibi}
    return alibi


def _opt(config: Any) -> Mapping[str, Any]:
    if config.do_layer_norm_before:
        return {}
    return {
        "attn_norm": None,
        "attn_sum_norm": "self_attn_layer_norm",
        "mlp_norm": None,
        "mlp_sum_norm": "final_layer_norm",
    }


def _opt_positions(model: nn.Module) -> Callable[[Tensor], Tensor]:
    table: Any = model.get_submodule("model.decoder.embed_positions")
    return lambda positions: table(positions, position_ids=positions)


def _inline_mlp(layer: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: layer.fc2(layer.activation_fn(layer.fc1(x)))


# Layer types that the generic adapter supports. It reads their attention pattern from the model's
# masks, and their state from the model's cache.
GENERIC_LAYER_TYPES = {
    "chunked_attention",
    "linear_attention",
    "conv",
    "mamba",
    "hybrid",
    "hybrid_sliding",
    "attention",
    "moe",
    "mlp",
}

_GRANITE = Family(
    embed_scale_key="embedding_multiplier",
    branch_scale_key="residual_multiplier",
    logit_divisor_key="logits_scaling",
)
_GEMMA3 = replace(_SANDWICH, rotary_takes_type=True)

FAMILIES: dict[str, Family] = {
    "cohere": Family(parallel=True, mlp_norm="input_layernorm", logit_scale_key="logit_scale"),
    "cwm": Family(window_layers="typed"),
    "ernie4_5": Family(rope_interleaved=True),
    "exaone4": replace(
        _POST_NORM,
        window_layers="typed",
        uses_rope=lambda attention: attention.sliding_window is None or attention.is_sliding,
    ),
    "falcon": Family(
        embed="transformer.word_embeddings",
        rotary="transformer.rotary_emb",
        layers="transformer.h",
        norm="transformer.ln_f",
        attn="self_attention",
        cache_argument="layer_past",
        extra_arguments={"alibi": None},
        variant=_falcon,
    ),
    "gemma": Family(),
    "gemma2": replace(
        _SANDWICH, attn_implementation="eager"
    ),  # its attention caps scores, which sdpa cannot do
    "gemma3": _nested(_GEMMA3, "model.language_model"),
    "gemma3_text": _GEMMA3,
    "glm": Family(rope_interleaved=True),
    "glm4": Family(
        rope_interleaved=True,
        attn_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    ),
    "gpt2": Family(
        embed="transformer.wte",
        positions="transformer.wpe",
        rotary=None,
        layers="transformer.h",
        norm="transformer.ln_f",
        attn="attn",
        attn_norm="ln_1",
        mlp_norm="ln_2",
    ),
    "gpt_neox": Family(
        embed="gpt_neox.embed_in",
        rotary="gpt_neox.rotary_emb",
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        attn="attention",
        cache_argument="layer_past",
        variant=_gpt_neox,
    ),
    "gpt_oss": Family(
        window_layers="typed",
        rotary_halves=True,
        attn_implementation="eager",  # sdpa cannot add sinks
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, mlp="block_sparse_moe"),
    "llama": Family(),
    "mistral": Family(window_layers="all"),
    "ministral3": Family(window_layers="all", takes_positions=True),
    "mixtral": Family(window_layers="all"),
    "nemotron": Family(),
    "olmo2": _POST_NORM,
    "olmo3": replace(_POST_NORM, window_layers="typed", rotary_takes_type=True),
    "olmoe": Family(),
    "opt": Family(
        embed="model.decoder.embed_tokens",
        embed_project="model.decoder.project_in",
        positions=_opt_positions,
        rotary=None,
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        head_project="model.decoder.project_out",
        attn_norm="self_attn_layer_norm",
        mlp=_inline_mlp,
        mlp_norm="final_layer_norm",
        variant=_opt,
    ),
    "persimmon": Family(norm="model.final_layernorm"),
    "phi": Family(norm="model.final_layernorm", parallel=True, mlp_norm="input_layernorm"),
    "phi3": Family(window_layers="all"),
    "qwen2": Family(window_layers="typed"),
    "qwen2_moe": Family(window_layers="typed"),
    "qwen3": Family(window_layers="typed"),
    "qwen3_moe": Family(window_layers="all"),
    "seed_oss": Family(),
    "smollm3": Family(window_layers="typed", uses_rope=lambda attention: bool(attention.use_rope)),
    "stablelm": Family(variant=_stablelm),
}


def family_of(config: Any) -> Family:
    """Return the row for a config, with its variant applied; a generic row if the table has none.

    Raises: ModelError if the family cannot be decoded exactly, or transformers has no decoder-only
    model of it.
    """
    name = getattr(config, "model_type", None) or "(none)"
    reason = _unsupported_reason(config, name)
    if reason:
        raise ModelError(
            f"{name} models cannot be driven exactly: {reason}; use a decoder-only model with "
            "plain attention"
        )
    if name not in FAMILIES:
        return Family(
            is_generic=True,
            attn_implementation="sdpa"
            if getattr(_model_class(config), "_supports_sdpa", False)
            else "eager",
        )
    family, text = FAMILIES[name], config.get_text_config(decoder=True)
    return replace(family, **family.variant(text)) if family.variant else family


def _unsupported_reason(config: Any, name: str) -> str | None:
    """Return why a model cannot be decoded with rollbacks of a KV cache; None if it can."""
    text = config.get_text_config(decoder=True)
    known = {"full_attention", "sliding_attention"} | (
        set() if name in FAMILIES else GENERIC_LAYER_TYPES
    )
    unknown = set(getattr(text, "layer_types", None) or ()) - known
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        return "an encoder feeds its decoder"
    if name not in FAMILIES and _model_class(config) is None:
        return "transformers has no model of them that continues text"
    if getattr(text, "use_bidirectional_attention", False):
        return "its tokens look ahead"
    if unknown:
        return f"no rule here says what layers of the kind {', '.join(sorted(unknown))} see"
    return None


def _model_class(config: Any) -> Any:
    """Return AutoModelForCausalLM's class for a config; None if it cannot be imported."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except (KeyError, ImportError):
        return None
