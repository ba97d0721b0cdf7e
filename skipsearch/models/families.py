"""The table of families: where a Hugging Face model of each keeps its pieces, and how its layers add them up.

To add a family: one row, keyed by the `model_type` of its config; CONTRIBUTING.md has the steps. What no path can say is a
small named function at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from skipsearch.errors import ModelError

Part = str | Callable[[nn.Module], Callable[[Tensor], Tensor]]  # a dotted path, or a function that finds or makes the piece


@dataclass(frozen=True)
class Family:
    """A row. The defaults are Llama: h + attn(attn_norm(h)), then h + mlp(mlp_norm(h)).

    Paths are dotted, those of the first group inside `AutoModelForCausalLM` and those of the second inside one of its layers;
    None says that the family has no such piece. Names ending in `_key` are keys of the config, read where they exist.
    """

    embed: Part = "model.embed_tokens"
    embed_project: Part | None = None       # between embedding and layers, where they differ in width
    positions: Part | None = None           # learned position embeddings: [B, T] int64 -> [B, T, H]
    rotary: str | None = "model.rotary_emb"
    layers: str = "model.layers"
    norm: Part | None = "model.norm"
    head_project: Part | None = None
    head: Part = "lm_head"

    attn: str = "self_attn"
    attn_norm: Part | None = "input_layernorm"
    attn_post_norm: Part | None = None      # of the branch, before it is added
    attn_sum_norm: Part | None = None       # of the sum, after it is added
    mlp: Part = "mlp"
    mlp_norm: Part | None = "post_attention_layernorm"
    mlp_post_norm: Part | None = None
    mlp_sum_norm: Part | None = None

    parallel: bool = False                  # attention and MLP read the same h, and both are added to it
    cache_argument: str = "past_key_values"
    extra_arguments: Mapping[str, Any] | None = None  # of the attention, the same in every pass
    rotary_by_type: bool = False            # rotary(h, positions, layer type) instead of rotary(h, positions)
    turned: Callable[[Any], bool] | None = None  # of an attention: whether it turns its heads by position; None: all of them do
    interleaved: bool = False               # which pairs of a head it turns: neighbours instead of halves
    alibi: bool = False                     # a bias for each head, linear in the key's position
    window: Literal["none", "all", "typed"] = "none"  # layers that see `sliding_window` tokens; typed: as config.layer_types says
    attention: Literal["sdpa", "eager"] = "sdpa"      # what the family is loaded with

    embed_scale_key: str | None = None      # × embeddings
    branch_scale_key: str | None = None     # × each branch before it is added
    logit_scale_key: str | None = None      # × logits
    logit_divisor_key: str | None = None    # logits ÷
    logit_cap_key: str | None = None        # cap · tanh(logits / cap)

    variant: Callable[[Any], Mapping[str, Any]] | None = None  # fields that depend on the config
    by_structure: bool = False              # of a family without a row: the model is read from itself, and no path above is looked at


# Norms before and after each branch.
_SANDWICH = Family(attn_post_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
                   mlp_post_norm="post_feedforward_layernorm", window="typed", logit_cap_key="final_logit_softcapping")

# Norms behind each branch alone.
_BEHIND = Family(attn_norm=None, attn_post_norm="post_attention_layernorm", mlp_norm=None, mlp_post_norm="post_feedforward_layernorm")


def _inside(family: Family, prefix: str) -> Family:
    """The same family as the text part of a model that also sees images; it is driven on text alone."""
    return replace(family, **{field: getattr(family, field).replace("model.", f"{prefix}.", 1)
                              for field in ("embed", "rotary", "layers", "norm")})


def _either_residual(config: Any) -> Mapping[str, Any]:
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
    return {"attn_norm": None, "attn_sum_norm": "self_attn_layer_norm", "mlp_norm": None, "mlp_sum_norm": "final_layer_norm"}


def _opt_positions(model: nn.Module) -> Callable[[Tensor], Tensor]:
    table: Any = model.get_submodule("model.decoder.embed_positions")
    return lambda positions: table(positions, position_ids=positions)


def _inline_mlp(layer: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: layer.fc2(layer.activation_fn(layer.fc1(x)))


# Kinds of layers that are read from the model itself: what they see from its masks, what they keep from its cache.
BY_STRUCTURE = {"chunked_attention", "linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "attention", "moe", "mlp"}

_GEMMA3 = replace(_SANDWICH, rotary_by_type=True)

FAMILIES: dict[str, Family] = {
    "cohere": Family(parallel=True, mlp_norm="input_layernorm", logit_scale_key="logit_scale"),
    "cwm": Family(window="typed"),
    "ernie4_5": Family(interleaved=True),
    "exaone4": replace(_BEHIND, window="typed", turned=lambda attention: attention.sliding_window is None or attention.is_sliding),
    "falcon": Family(embed="transformer.word_embeddings", rotary="transformer.rotary_emb", layers="transformer.h",
                     norm="transformer.ln_f", attn="self_attention", cache_argument="layer_past", extra_arguments={"alibi": None},
                     variant=_falcon),
    "gemma": Family(),
    "gemma2": replace(_SANDWICH, attention="eager"),  # its attention caps scores, which sdpa cannot
    "gemma3": _inside(_GEMMA3, "model.language_model"),
    "gemma3_text": _GEMMA3,
    "glm": Family(interleaved=True),
    "glm4": Family(interleaved=True, attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
    "gpt2": Family(embed="transformer.wte", positions="transformer.wpe", rotary=None, layers="transformer.h",
                   norm="transformer.ln_f", attn="attn", attn_norm="ln_1", mlp_norm="ln_2"),
    "gpt_neox": Family(embed="gpt_neox.embed_in", rotary="gpt_neox.rotary_emb", layers="gpt_neox.layers",
                       norm="gpt_neox.final_layer_norm", attn="attention", cache_argument="layer_past", variant=_either_residual),
    "granite": Family(embed_scale_key="embedding_multiplier", branch_scale_key="residual_multiplier",
                      logit_divisor_key="logits_scaling"),
    "llama": Family(),
    "mistral": Family(window="all"),
    "mixtral": Family(window="all"),
    "nemotron": Family(),
    "olmo2": _BEHIND,
    "olmo3": replace(_BEHIND, window="typed", rotary_by_type=True),
    "opt": Family(embed="model.decoder.embed_tokens", embed_project="model.decoder.project_in", positions=_opt_positions,
                  rotary=None, layers="model.decoder.layers", norm="model.decoder.final_layer_norm",
                  head_project="model.decoder.project_out",
                  attn_norm="self_attn_layer_norm", mlp=_inline_mlp, mlp_norm="final_layer_norm", variant=_opt),
    "persimmon": Family(norm="model.final_layernorm"),
    "phi": Family(norm="model.final_layernorm", parallel=True, mlp_norm="input_layernorm"),
    "phi3": Family(window="all"),
    "qwen2": Family(window="typed"),
    "qwen3": Family(window="typed"),
    "qwen3_moe": Family(window="all"),
    "seed_oss": Family(),
    "smollm3": Family(window="typed", turned=lambda attention: bool(attention.use_rope)),
    "stablelm": Family(variant=_stablelm),
}


def family_of(config: Any) -> Family:
    """The row for a config, its variant settled; for a family without a row, one that says so.

    Raises: ModelError for a family that cannot be exact, or that transformers has no decoder-only model of.
    """
    name = getattr(config, "model_type", None) or "(none)"
    reason = _never(config, name)
    if reason:
        raise ModelError(f"{name} models cannot be driven exactly: {reason}; use a decoder-only model with plain attention")
    if name not in FAMILIES:
        return Family(by_structure=True, attention="sdpa" if getattr(_class_of(config), "_supports_sdpa", False) else "eager")
    family, text = FAMILIES[name], config.get_text_config(decoder=True)
    return replace(family, **family.variant(text)) if family.variant else family


def _never(config: Any, name: str) -> str | None:
    """Why a model can never be decoded by rolling a KV cache back, as half a sentence; None if nothing speaks against it."""
    text = config.get_text_config(decoder=True)
    known = {"full_attention", "sliding_attention"} | (set() if name in FAMILIES else BY_STRUCTURE)
    odd = set(getattr(text, "layer_types", None) or ()) - known
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        return "an encoder feeds its decoder"
    if name not in FAMILIES and _class_of(config) is None:
        return "transformers has no model of them that continues text"
    if getattr(text, "use_bidirectional_attention", False):
        return "its tokens look ahead"
    return f"no rule here says what layers of the kind {', '.join(sorted(odd))} see" if odd else None


def _class_of(config: Any) -> Any:
    """The class that AutoModelForCausalLM takes for a config; None if there is none, or it cannot be imported."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except (KeyError, ImportError):
        return None
