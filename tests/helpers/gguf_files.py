"""Write tiny models of transformers as GGUF files, with the writer and rounding of `gguf`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

# model_type of transformers -> architecture of the file
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "arcee": "arcee",
    "hunyuan_v1_dense": "hunyuan-dense",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "glm": "chatglm",
    "glm4": "glm4",
    "smollm3": "smollm3",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gemma2": "gemma2",
    "gemma4_text": "gemma4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "gpt_oss": "gpt-oss",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "glm4_moe": "glm4moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "mimo_v2_flash": "mimo2",
    "dots1": "dots1",
    "exaone_moe": "exaone-moe",
    "afmoe": "afmoe",
    "apertus": "apertus",
    "falcon_h1": "falcon-h1",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "youtu": "deepseek2",
    "minicpm3": "minicpm3",
    "nemotron": "nemotron",
    "jais2": "jais2",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "olmo": "olmo",
    "falcon": "falcon",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "bloom": "bloom",
    "mpt": "mpt",
}
ROTATES_NEIGHBOURS = (
    "llama",
    "mistral3",
    "arcee",
    "granite",
    "granitemoe",
    "granitehybrid",
    "smollm3",
    "olmo",
)
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
# Architecture with layer norms -> the attribute of the config that has their epsilon, or the number
LAYER_NORMS: dict[str, str | float] = {
    "nemotron_h": "layer_norm_epsilon",
    "nemotron_h_moe": "layer_norm_epsilon",
    "command-r": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "nemotron": "norm_eps",
    "jais2": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "phi2": "layer_norm_eps",
    "gptneox": "layer_norm_eps",
    "olmo": 1e-5,
    "falcon": "layer_norm_epsilon",
    "gpt2": "layer_norm_epsilon",
    "starcoder": "layer_norm_epsilon",
    "bloom": "layer_norm_epsilon",
    "mpt": "layer_norm_epsilon",
}
FOUR_TIMES_AS_WIDE = ("gpt2", "starcoder", "bloom", "mpt")  # MLPs
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # GPT-2
NEMOTRON_H = ("nemotron_h", "nemotron_h_moe")
# What files have in float32 although it is no vector.
IN_FLOAT32 = (
    "gate.weight", "wg.weight", "router.weight", "router.proj.weight", "norm.weight",
    "conv1d.weight",
    "conv.conv.weight", "_bias", "A_log", "mamba.D", "mixer.D",
)  # fmt: skip
NAMES_OF_NEMOTRON_H = {
    "norm.weight": "attn_norm.weight",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
# Endings of names in transformers that llama.cpp's converter renames itself.
RENAMED = {
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "f_a_proj.weight": "ssm_f_a.weight",
    "f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
# A key -> the attribute of a config that it says, or what it makes of the config.
Attributes = dict[str, str | Callable[[Any], Any]]
SIGMOID_EXPERTS: Attributes = {
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
MAMBA1: Attributes = {
    "ssm_conv_kernel": "conv_kernel",
    "ssm_state_size": "state_size",
    "ssm_inner_size": lambda config: config.expand * config.hidden_size,
}
WITHOUT_ATTENTION = ("mamba", "mamba2")
# Architecture -> what files say that only a few have.
EXTRA_SETTINGS: dict[str, Attributes] = {
    "kimi-linear": {
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "ssm_conv_kernel": "linear_conv_kernel_dim",
        "kda_head_dim": "linear_head_dim",
    },
    "mamba": {
        **MAMBA1,
        "ssm_time_step_rank": "time_step_rank",
        "ssm_dt_b_c_rms": lambda config: config.model_type == "falcon_mamba",
    },
    "mamba2": {**MAMBA1, "ssm_time_step_rank": "num_heads", "ssm_group_count": "n_groups"},
    "jamba": {
        "ssm_conv_kernel": "mamba_d_conv",
        "ssm_state_size": "mamba_d_state",
        "ssm_inner_size": lambda config: config.mamba_expand * config.hidden_size,
        "ssm_time_step_rank": "mamba_dt_rank",
    },
    "falcon-h1": {
        "ssm_conv_kernel": "mamba_d_conv",
        "ssm_state_size": "mamba_d_state",
        "ssm_inner_size": "mamba_d_ssm",
        "ssm_time_step_rank": "mamba_n_heads",
        "ssm_group_count": "mamba_n_groups",
    },
    "ernie4_5-moe": {
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
        "expert_shared_count": "moe_num_shared_experts",
    },
    "hunyuan-moe": {
        "expert_feed_forward_length": "intermediate_size",
        "expert_shared_feed_forward_length": "intermediate_size",
    },
    "stablelm": {"parallel_residual": "use_parallel_residual"},
    "gptneox": {"parallel_residual": "use_parallel_residual"},
    "mpt": {
        "max_alibi_bias": lambda config: float(config.attn_config.alibi_bias_max),
        "clamp_kqv": lambda config: config.attn_config.clip_qkv,
    },
    "olmo": {"clamp_kqv": "clip_qkv"},
    "mimo2": {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"},
    "minimax-m2": {"expert_feed_forward_length": "intermediate_size"},
    "dots1": SIGMOID_EXPERTS,
    "exaone-moe": {**SIGMOID_EXPERTS, "expert_shared_count": "num_shared_experts"},
    "glm4moe": SIGMOID_EXPERTS,
    "afmoe": {
        "expert_shared_count": "num_shared_experts",
        "leading_dense_block_count": "num_dense_layers",
        "expert_weights_scale": "route_scale",
    },
}
SCORED_BY_SIGMOID = (
    "lfm2moe",
    "glm4moe",
    "minimax-m2",
    "mimo2",
    "dots1",
    "exaone-moe",
    "afmoe",
    "kimi-linear",
)
CODES = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
FORMATS = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "MXFP4",
)  # that gguf can write


def name_architecture(config: Any) -> str:
    """Return the architecture of the file of a model."""
    has_experts = "moe" in (getattr(config, "layer_types", None) or ())
    return ARCHITECTURES[config.model_type] + ("_moe" if has_experts else "")


def round_to_format(weight: Tensor, number_format: str) -> Tensor:
    """Return a matrix as a file of this format has it, in float32."""
    kind = gguf.GGMLQuantizationType[number_format]
    data = gguf.quants.quantize(weight.float().numpy(), kind)
    return torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view(weight.shape)


def round_model(model: Any, number_format: str) -> Any:
    """The model itself, its matrices and its embedding rounded to a format."""
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and not name.endswith(IN_FLOAT32):
            # gpt-oss has the matrices of its experts transposed.
            is_transposed = ".experts." in name and getattr(model.config, "swiglu_limit", 0)
            rows = weight.transpose(1, 2) if is_transposed else weight
            rows = round_to_format(rows.contiguous(), number_format)
            weight.copy_(rows.transpose(1, 2) if is_transposed else rows)
    return model


def write_model(
    model: Any,
    path: Path,
    number_format: str = "F32",
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    shards: int = 0,
    joined: tuple[str, ...] = ("chatglm",),
) -> None:
    """Write a model. metadata: entries to add or replace. extra: more tensors. shards: tensors in a
    file of a split model; 0: one file. joined: architectures with one matrix for queries, keys and
    values.
    """
    config = model.config
    architecture = name_architecture(config)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=shards)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture in WITHOUT_ATTENTION:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    else:
        _add_attention(writer, architecture, config)
    if (epsilon := LAYER_NORMS.get(architecture)) is not None:
        writer.add_layer_norm_eps(getattr(config, epsilon) if isinstance(epsilon, str) else epsilon)
    else:
        names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        epsilons = (getattr(config, name, None) for name in names)
        writer.add_layer_norm_rms_eps(next(epsilon for epsilon in epsilons if epsilon))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    per_token = getattr(config, "num_experts_per_tok", None)
    if per_token and architecture != "nemotron_h":
        n_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(per_token)
        if width := getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(width)
        if width := getattr(config, "shared_expert_intermediate_size", None):
            writer.add_expert_shared_feed_forward_length(width)
    _add_settings(writer, architecture, config)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
        for length in ("short", "long"):
            factors = torch.tensor(rope[f"{length}_factor"])
            _add(writer, f"rope_factors_{length}.weight", factors, "F32")
    if architecture in ("granite", "granitemoe", "granitehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("exaone4", "exaone_moe", "olmo3"):
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config.layer_types])
    state = dict(model.state_dict())
    if architecture == "apertus":  # numbers of its activation are metadata
        for key in ("alpha_p", "alpha_n", "beta", "eps"):
            names = [name for name in state if name.endswith(f"act_fn.{key}")]
            getattr(writer, f"add_xielu_{key}")([float(state.pop(name)) for name in names])
    for key, value in (metadata or {}).items():
        kind = {int: "uint32", float: "float32", str: "string", list: "array", bool: "bool"}
        getattr(writer, f"add_{kind[type(value)]}")(key, value)
    if "tokenizer.ggml.model" not in (metadata or {}):
        writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(CODES[architecture], config.num_hidden_layers)
    if getattr(config, "qk_layernorm", False):
        _stack_norms(state)
    for i in range(config.num_hidden_layers) if architecture in joined else ():
        for kind in ("weight", "bias"):
            start = f"model.layers.{i}.self_attn."
            rows = [state.pop(f"{start}{part}_proj.{kind}") for part in "qkv"]
            state[f"blk.{i}.attn_qkv.{kind}"] = torch.cat(rows)
    for name, weight in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for new_name, value in _convert(name, weight.detach().float(), architecture, config):
            known = new_name.startswith(("blk.", "token_embd", "output_norm")) or names.get_name(
                new_name, (".weight", ".bias")
            )
            new_name = new_name if known is True else known
            _add(writer, new_name, value, "F32" if name.endswith(IN_FLOAT32) else number_format)
    for name, value in (extra or {}).items():
        _add(writer, name, value, number_format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stack_norms(state: dict[str, Tensor]) -> None:
    """Make one tensor of the norms of all heads of a layer."""
    for first in [name for name in state if name.endswith(".norms.0.weight")]:
        start = first.removesuffix("0.weight")
        heads = [name for name in state if name.startswith(start)]
        part = "q" if "q_layernorm" in start else "k"
        layer = start.split(".")[2]
        state[f"blk.{layer}.attn_{part}_norm.weight"] = torch.stack(
            [state.pop(name) for name in heads]
        )


def _add_attention(writer: Any, architecture: str, config: Any) -> None:
    """Add what all architectures have but for those that do not attend."""
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    rope = rope.get("full_attention", rope)
    first = config.per_layer_config[0] if architecture == "gemma4" else config
    head_dim = getattr(first, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or []
    if architecture in NEMOTRON_H:
        width = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
        writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
    elif architecture == "falcon":
        writer.add_feed_forward_length(config.ffn_hidden_size)
    elif architecture in FOUR_TIMES_AS_WIDE:
        writer.add_feed_forward_length(4 * config.hidden_size)
    elif getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture in ("lfm2", "lfm2moe", "granitehybrid", "jamba", *NEMOTRON_H):
        heads_kv = [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]
        writer.add_head_count_kv(heads_kv)
    elif architecture == "falcon":
        writer.add_head_count_kv(_count_key_heads(config))
    elif architecture in ("starcoder", "bloom"):
        writer.add_head_count_kv(1 if architecture == "starcoder" else config.n_head)
    elif architecture not in ("gptneox", "gpt2", "mpt"):
        writer.add_head_count_kv(first.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))


def _add_settings(writer: Any, architecture: str, config: Any) -> None:
    """Add what one or two architectures alone have."""
    _add_from_config(writer, config, EXTRA_SETTINGS.get(architecture, {}))
    if architecture in SCORED_BY_SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "mimo2":
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * (1 + slide) for slide in slides])
        writer.add_sliding_window_pattern(slides)
        writer.add_value_length(config.v_head_dim)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
    if architecture == "ernie4_5-moe":
        width = config.intermediate_size // config.num_key_value_heads
        writer.add_expert_shared_feed_forward_length(width)
    if architecture == "exaone-moe":
        width = config.moe_intermediate_size * config.num_shared_experts
        writer.add_expert_shared_feed_forward_length(width)
    if architecture == "afmoe":
        writer.add_expert_weights_norm(True)
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    if architecture == "deepseek2":
        _add_deepseek2(writer, config)
    if architecture == "minicpm3":
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if architecture == "kimi-linear":
        _add_latent(writer, config)
        writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
        writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    if architecture == "mistral3":
        rope = config.rope_parameters
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_vocab_size(config.vocab_size)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture in ("lfm2", "lfm2moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if architecture == "granitehybrid":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        if config.num_local_experts:
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if architecture in NEMOTRON_H:
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_group_count(config.n_groups)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if architecture == "nemotron_h_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
    if hasattr(config, "linear_num_value_heads"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)


def _add_from_config(writer: Any, config: Any, keys: Attributes) -> None:
    for key, attribute in keys.items():
        value = getattr(config, attribute) if isinstance(attribute, str) else attribute(config)
        getattr(writer, f"add_{key}")(value)


def _add_latent(writer: Any, config: Any) -> None:
    """Add the widths of keys and values that are made of latents."""
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)


def _add_deepseek2(writer: Any, config: Any) -> None:
    _add_latent(writer, config)
    writer.add_head_count_kv(1)
    keys = dict(SIGMOID_EXPERTS)
    if config.model_type == "youtu":  # dense
        keys = {}
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
    elif config.model_type == "deepseek_v2":  # not normalised
        del keys["expert_weights_norm"]
    else:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "glm4_moe_lite":
        keys["leading_dense_block_count"] = lambda config: config.mlp_layer_types.index("sparse")
    _add_from_config(writer, config, keys)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_gemma4(writer: Any, config: Any) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[slides.index(False)]
    rope, n_layers = config.rope_parameters, config.num_hidden_layers
    first_shared = n_layers - config.num_kv_shared_layers
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    sliding = config.per_layer_config[slides.index(True)]
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_value_length_swa(sliding.head_dim)
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count_swa(sliding.head_dim)
    for add, number in (
        (writer.add_key_length, full.head_dim),
        (writer.add_value_length, full.head_dim),
        (writer.add_rope_dimension_count, full.head_dim),
        (writer.add_head_count_kv, [
            (sliding if slide else full).num_key_value_heads for slide in slides
        ]),
    ):  # fmt: skip
        add(number)
    if config.use_double_wide_mlp:
        width = config.intermediate_size
        writer.add_feed_forward_length([width * (1 + (i >= first_shared)) for i in range(n_layers)])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    n_turned = int(full.head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = torch.full((full.head_dim // 2,), 1e30)
    divisors[:n_turned] = 1.0
    _add(writer, "rope_freqs.weight", divisors, "F32")


def _convert(
    name: str, value: Tensor, architecture: str, config: Any
) -> Iterator[tuple[str, Tensor]]:
    """Yield what llama.cpp's converter makes of a tensor, under its name or that of the file."""
    parts, module = name.split("."), name.split(".")[-2]
    numbers = [part for part in parts if part.isdigit()]
    layer = f"blk.{numbers[0]}." if numbers else ""
    if architecture in NEMOTRON_H:
        yield _convert_nemotron_h(name, layer, value, config)
        return
    if "kv_b_proj" in name and architecture != "minicpm3":
        width = config.qk_nope_head_dim + config.v_head_dim
        by_head = value.unflatten(0, (config.num_attention_heads, width))
        keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        yield f"{layer}attn_k_b.weight", keys.transpose(1, 2)
        yield f"{layer}attn_v_b.weight", values
        return
    if architecture == "kimi-linear" and "conv1d" in name:
        for part, kernels in zip("qkv", value.chunk(3), strict=True):
            yield f"{layer}ssm_conv1d_{part}.weight", kernels[None]
        return
    if architecture == "gpt2" and name.endswith(TRANSPOSED):
        value = value.T
    if architecture == "bloom":
        name = name.removeprefix("transformer.")
    if "query_key_value" in name:
        value = _split_by_head(value, architecture, config)
    if ".experts." in name:
        yield from _convert_experts(
            f"{layer}ffn_",
            parts[-1],
            value,
            architecture == "gpt-oss",
            architecture in ("gemma4", "qwen35moe"),
        )
        return
    if architecture in ROTATES_NEIGHBOURS and module in ("q_proj", "k_proj"):
        is_query = module == "q_proj"
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if "shared_mlp.input_linear" in name:
        kind = "_shexp" if config.num_local_experts else ""
        gate, up = value.chunk(2)
        yield f"{layer}ffn_gate{kind}.weight", gate
        yield f"{layer}ffn_up{kind}.weight", up
        return
    if "in_proj_qkvz" in name:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        widths = [config.linear_key_head_dim] * 2
        widths += [values // keys * config.linear_value_head_dim] * 2
        q, k, v, z = (
            part.flatten(0, 1) for part in value.unflatten(0, (keys, -1)).split(widths, 1)
        )
        yield f"{layer}attn_qkv.weight", torch.cat([q, k, v])
        yield f"{layer}attn_gate.weight", z
        return
    if architecture.startswith("qwen35") and "linear_attn." in name:
        value = _tile_value_heads(name, value, config)
    if architecture == "falcon-h1":
        value = value * _find_factor(name, value, config)
    if name.endswith("A_log"):
        value = -value.exp()
    if name.endswith("norm.weight") and architecture in NORMS_PLUS_ONE and module != "norm":
        value = value + 1
    if name == "model.norm.weight" and architecture in NORMS_PLUS_ONE:
        value = value + 1
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        value = value.squeeze(1)
    if "shared_expert_gate" in name:
        value = value.squeeze(0)
    if architecture in ("granitehybrid", "falcon-h1", "mamba2"):
        if name.endswith(("A_log", "mamba.D", "mixer.D")):
            value = value[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            value = value.view(getattr(config, "mamba_n_groups", 0) or config.n_groups, -1)
    for ending, new_name in RENAMED.items():
        if name.endswith(ending):
            if new_name == "ffn_down_shexp.weight" and not config.num_local_experts:
                new_name = "ffn_down.weight"
            yield layer + new_name, value
            return
    yield name, value


def _convert_nemotron_h(name: str, layer: str, value: Tensor, config: Any) -> tuple[str, Tensor]:
    if not layer:
        return {"model.embeddings.weight": "token_embd.weight",
                "model.norm_f.weight": "output_norm.weight"}.get(name, name), value  # fmt: skip
    ending = name.split(".", 3)[3]
    if ending == "mixer.A_log":
        value = -value.exp()
    if ending in ("mixer.A_log", "mixer.D"):
        value = value[:, None]
    if ending == "mixer.norm.weight":
        value = value.view(config.n_groups, -1)
    if ending == "mixer.conv1d.weight":
        value = value.squeeze(1)
    return layer + NAMES_OF_NEMOTRON_H[ending], value


def _find_factor(name: str, value: Tensor, config: Any) -> Any:
    """Return what Falcon H1 multiplies by, which is part of the matrices in files."""
    if "mamba.in_proj" in name:
        states = config.mamba_n_groups * config.mamba_d_state
        widths = [config.mamba_d_ssm] * 2 + [states] * 2 + [config.mamba_n_heads]
        factors = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor(widths))
        return config.ssm_in_multiplier * factors[:, None]
    attention = config.attention_in_multiplier
    for part, factor in (
        ("gate_proj", config.mlp_multipliers[0]),
        ("down_proj", config.mlp_multipliers[1]),
        ("q_proj", attention),
        ("k_proj", attention * config.key_multiplier),
        ("v_proj", attention),
        ("o_proj", config.attention_out_multiplier),
        ("mamba.out_proj", config.ssm_out_multiplier),
        ("lm_head", config.lm_head_multiplier),
        ("embed_tokens", config.embedding_multiplier),
    ):
        if part in name:
            return factor
    return 1.0


def _split_by_head(value: Tensor, architecture: str, config: Any) -> Tensor:
    """Return the rows of queries, then those of keys, then those of values."""
    if architecture != "falcon":
        return value.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    heads, kv_heads = config.num_attention_heads, _count_key_heads(config)
    groups = value.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
    return torch.cat([part.flatten(0, 2) for part in groups.split([heads // kv_heads, 1, 1], 1)])


def _count_key_heads(config: Any) -> int:
    return int(config.num_kv_heads) if config.new_decoder_architecture else 1


def _convert_experts(
    start: str, ending: str, value: Tensor, alternate: bool, is_fused: bool
) -> Iterator[tuple[str, Tensor]]:
    """alternate: the rows of gate and up take turns, and matrices are transposed, as gpt-oss has
    them. is_fused: gate and up stay together, as newer files have them.
    """
    kind = "bias" if ending.endswith("_bias") else "weight"
    if is_fused and ending.startswith("gate_up"):
        yield f"{start}gate_up_exps.weight", value
        return
    if alternate and kind == "weight":
        value = value.transpose(1, 2)
    if not ending.startswith("gate_up"):
        yield f"{start}down_exps.{kind}", value
        return
    gate, up = (value[:, ::2], value[:, 1::2]) if alternate else value.chunk(2, dim=1)
    yield f"{start}gate_exps.{kind}", gate
    yield f"{start}up_exps.{kind}", up


def _tile_value_heads(name: str, value: Tensor, config: Any) -> Tensor:
    keys = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // keys

    def tile(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (keys, per_key, -1)).transpose(0, 1).flatten(0, 2)

    if "out_proj" in name:
        return tile(value.T).T
    if "in_proj_qkv." in name or "conv1d" in name:
        first = 2 * keys * config.linear_key_head_dim
        return torch.cat([value[:first], tile(value[first:])])
    return value if "norm" in name else tile(value)


def _add(writer: Any, name: str, value: Tensor, number_format: str) -> None:
    data = value.contiguous().numpy()
    if value.ndim == 1 or number_format == "F32":
        writer.add_tensor(name, data)
        return
    kind = gguf.GGMLQuantizationType[number_format]
    if data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType.F16  # as the converter falls back
    quantised = gguf.quants.quantize(data, kind)
    if kind == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, quantised)
    else:
        writer.add_tensor(name, quantised, raw_dtype=kind)
