"""A tiny random model of each family, and what the contract tests must know of it that the adapter
is not asked for.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from helpers.marks import thorough
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from skipsearch.core.mask import SkipMask
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import FUSABLE, fuse_model
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

VOCAB, LAYERS = 61, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Tiny:
    """family: `model_type`; config: what it says beside SHAPE.

    layers: path of the list of layers. attn, mlp: path, inside a layer, of the module whose output
    zeroed is that sub-layer's branch removed. attn_sum_norm, mlp_sum_norm: of the norm that a
    sub-layer ends in where it norms the sum; it goes with it."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    layers: str = "model.layers"
    attn: str = "self_attn"
    mlp: str = "mlp"
    attn_sum_norm: str | None = None
    mlp_sum_norm: str | None = None


FALCON = ("transformer.h", "self_attention")
TINY: dict[str, Tiny] = {
    "cohere": Tiny("cohere", {"logit_scale": 0.7, "use_qk_norm": True}),
    "cwm": Tiny(
        "cwm",
        {
            "sliding_window": 8,
            "head_dim": 8,
            "bos_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "ernie4_5": Tiny("ernie4_5", {"use_bias": True, "head_dim": 8}),
    "exaone4": Tiny(
        "exaone4",
        {"sliding_window": 8, "sliding_window_pattern": 2, "layer_types": TYPES, "head_dim": 8},
    ),
    "falcon-7b": Tiny(
        "falcon",
        {
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "multi_query": True,
            "bias": True,
            "alibi": False,
        },
        *FALCON,
    ),
    "falcon-40b": Tiny(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}, *FALCON
    ),
    "falcon-11b": Tiny(
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
            "num_ln_in_parallel_attn": 1,
        },
        *FALCON,
    ),
    "falcon-rw": Tiny(
        "falcon",
        {
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "multi_query": False,
            "bias": True,
            "alibi": True,
        },
        *FALCON,
    ),
    "falcon-six-heads": Tiny(
        "falcon",
        {
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "multi_query": False,
            "alibi": True,
            "num_attention_heads": 6,
            "hidden_size": 24,
        },
        *FALCON,
    ),
    "gemma": Tiny("gemma", {"head_dim": 8}),
    "gemma2": Tiny(
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": Tiny(
        "gemma3",
        {
            "text_config": {**SHAPE, "head_dim": 8, "sliding_window": 8, "layer_types": TYPES},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 1,
        },
        "model.language_model.layers",
    ),
    "gemma3_text": Tiny(
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 8, "layer_types": TYPES, "final_logit_softcapping": 2.0},
    ),
    "glm": Tiny("glm", {"head_dim": 8, "attention_bias": True}),
    "glm4": Tiny("glm4", {"head_dim": 8, "attention_bias": True}),
    "gpt2": Tiny("gpt2", layers="transformer.h", attn="attn"),
    "gpt_neox": Tiny("gpt_neox", {"use_parallel_residual": True}, "gpt_neox.layers", "attention"),
    "gpt_neox-sequential": Tiny(
        "gpt_neox", {"use_parallel_residual": False}, "gpt_neox.layers", "attention"
    ),
    "gpt_oss": Tiny(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "head_dim": 8,
            "sliding_window": 8,
            "swiglu_limit": 1.0,
            "layer_types": TYPES,
            "pad_token_id": None,
        },
    ),
    "granite": Tiny(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "attention_multiplier": 0.4,
        },
    ),
    "granitemoe": Tiny(
        "granitemoe",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "attention_multiplier": 0.4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
        },
        mlp="block_sparse_moe",
    ),
    "llama": Tiny("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Tiny("llama", {"tie_word_embeddings": True}),
    "mistral": Tiny("mistral", {"sliding_window": None}),
    "mistral-window": Tiny("mistral", {"sliding_window": 8}),
    "mixtral": Tiny(
        "mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "intermediate_size": 32,
        },
    ),
    "nemotron": Tiny("nemotron", {"head_dim": 8, "attention_bias": True}),
    "olmo2": Tiny("olmo2"),
    "olmo3": Tiny("olmo3", {"sliding_window": 8, "layer_types": TYPES}),
    "olmoe": Tiny(
        "olmoe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "num_key_value_heads": 4,
            "norm_topk_prob": False,
        },
    ),
    "opt": Tiny("opt", {"ffn_dim": 48}, "model.decoder.layers", mlp="fc2"),
    "opt-350m": Tiny(
        "opt",
        {"ffn_dim": 48, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
        "model.decoder.layers",
        mlp="fc2",
        attn_sum_norm="self_attn_layer_norm",
        mlp_sum_norm="final_layer_norm",
    ),
    "persimmon": Tiny("persimmon", {"qk_layernorm": True}),
    "phi": Tiny("phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3": Tiny("phi3", {"sliding_window": 8}),
    "phi3-longrope": Tiny(
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "qwen2": Tiny(
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    ),
    "qwen2_moe": Tiny(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Tiny("qwen3", {"head_dim": 8}),
    "qwen3_moe": Tiny(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 8,
            "mlp_only_layers": [1],
        },
    ),
    # The temperature of attention changes from position 8 on.
    "ministral3": Tiny(
        "ministral3",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 12.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.7,
            },
        },
    ),
    "seed_oss": Tiny(
        "seed_oss", {"head_dim": 8, "attention_bias": True, "attention_out_bias": True}
    ),
    "smollm3": Tiny(
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": TYPES,
            "no_rope_layers": [1, 0, 1],
        },
    ),
    "stablelm": Tiny(
        "stablelm", {"use_parallel_residual": False, "qk_layernorm": True, "use_qkv_bias": True}
    ),
    "stablelm-parallel": Tiny("stablelm", {"use_parallel_residual": True}),
}


FUSABLE_NAMES = [name for name, tiny in TINY.items() if tiny.family in FUSABLE]
FUSED = [f"{name}:lean" for name in FUSABLE_NAMES]
# Of the families whose experts have no more than gate, up and down, one is enough for `make test`.
FUSED_FAMILIES = [
    *(name for name in FUSABLE_NAMES if name not in ("granitemoe", "mixtral", "olmoe")),
    *thorough("granitemoe", "mixtral", "olmoe"),
]
ADAPTED = [*TINY, *FUSED]  # every way to drive each of them


def tiny_of(name: str) -> Tiny:
    return TINY[name.partition(":")[0]]


def hf_model(name: str) -> nn.Module:
    return _hf_model(name.partition(":")[0])


@cache
def _hf_model(name: str) -> nn.Module:
    """The same object for every test: none of them may alter it, and one test makes sure that none
    does.
    """
    return new_hf_model(name)


def new_hf_model(name: str, **changes: Any) -> nn.Module:
    tiny = tiny_of(name)
    return new_random_model(tiny.family, **{**tiny.config, **changes})


def new_random_model(family: str, **changes: Any) -> nn.Module:
    """A model of any family of transformers, of SHAPE but for the changes."""
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    config.get_text_config()._experts_implementation = "eager"  # the grouped kernels know no fp64
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return randomised(model).eval().requires_grad_(False)


def randomised(model: nn.Module) -> nn.Module:
    """Every weight drawn anew: an initialisation full of ones and zeros would hide a norm or a bias
    that is left out.
    """
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        if weight.ndim > 1:
            noise *= weight.shape[-1] ** -0.5
        else:
            noise = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
        with torch.no_grad():
            weight.copy_(noise)
    return model


def some_tokens(n: int, seed: int = 2) -> Tensor:
    """[1, n] random token ids."""
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))


class Run:
    """Drives an adapter pass by pass, as decoding does: the port and nothing else."""

    def __init__(self, model: ModelAdapter, capacity: int = 64):
        self.model, self.cache = model, model.new_cache(1, capacity)
        self.planner = Planner(capacity, model.spec.device)

    def __call__(self, tokens: Tensor, mask: SkipMask | None = None) -> Tensor:
        """tokens: [1, T] -> logits [T, V] of a pass behind what is committed; commits nothing."""
        return self.layers(
            tokens, self.planner.plan_chain(self.cache.length, tokens.shape[1]), mask
        )

    def commit(self, tokens: Tensor) -> Tensor:
        logits = self(tokens)
        self.cache.length += tokens.shape[1]
        return logits

    @torch.no_grad()
    def layers(self, tokens: Tensor, plan: PassPlan, mask: SkipMask | None) -> Tensor:
        return logits_of(self.model, tokens, self.cache, plan, mask)


def logits_of(
    model: ModelAdapter,
    tokens: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask | None = None,
) -> Tensor:
    h = model.embed(tokens, plan.positions)
    for i in range(model.spec.n_layers):
        h = model.block(
            i,
            h,
            cache,
            plan,
            attn=mask is None or i not in mask.attn,
            mlp=mask is None or i not in mask.mlp,
        )
    return model.head(h)[0]


def adapted(name: str) -> ModelAdapter:
    """The adapter over the shared model's modules, or, for a name with an engine behind it, over
    the weights of a model of its own.
    """
    return copy.copy(_fused(name)) if ":" in name else adapt(hf_model(name))


@cache
def _fused(name: str) -> ModelAdapter:
    model = new_hf_model(name)
    return fuse_model(model, replace(adapt(model).spec, engine="lean"), family_of(model.config))


@torch.no_grad()
def full_logits(name: str, tokens: Tensor) -> Tensor:
    """[1, T] -> [T, V], of one forward of the Hugging Face model over everything, without a
    cache.
    """
    return hf_model(name)(input_ids=tokens, use_cache=False).logits[0]


def logits_without(name: str, tokens: Tensor, mask: SkipMask) -> Tensor:
    """The Hugging Face model's own forward with these sub-layers cut out by hooks: [1, T] -> [T,
    V].
    """
    tiny, model = tiny_of(name), hf_model(name)
    layers = attrgetter(tiny.layers)(model)
    with ExitStack() as hooks:
        for branch, sum_norm, indices in (
            (tiny.attn, tiny.attn_sum_norm, mask.attn),
            (tiny.mlp, tiny.mlp_sum_norm, mask.mlp),
        ):
            for i in indices:
                hooks.callback(attrgetter(branch)(layers[i]).register_forward_hook(_zero).remove)
                if sum_norm is not None:
                    hooks.callback(
                        attrgetter(sum_norm)(layers[i]).register_forward_hook(_identity).remove
                    )
        return full_logits(name, tokens)


def _zero(module: nn.Module, inputs: Any, output: Any) -> Any:
    return (
        (torch.zeros_like(output[0]), *output[1:])
        if isinstance(output, tuple)
        else torch.zeros_like(output)
    )


def _identity(module: nn.Module, inputs: Any, output: Any) -> Any:
    return inputs[0]
