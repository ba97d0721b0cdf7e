"""Write tiny models of transformers as GGUF files, with the writer and rounding of `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

# model_type of transformers -> architecture of the file
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "granite": "granite",
    "glm4": "glm4",
    "smollm3": "smollm3",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
}
ROTATES_NEIGHBOURS = ("llama", "granite", "smollm3")
ROUTERS = ("mlp.gate.weight", "shared_expert_gate.weight")  # which files have in float32
CODES = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # that gguf can write


def round_to_format(weight: Tensor, number_format: str) -> Tensor:
    """Return a matrix as a file of this format has it, in float32."""
    kind = gguf.GGMLQuantizationType[number_format]
    data = gguf.quants.quantize(weight.float().numpy(), kind)
    return torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).view(weight.shape)


def round_model(model: nn.Module, number_format: str) -> nn.Module:
    """The model itself, its matrices and its embedding rounded to a format."""
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and not name.endswith(ROUTERS):
            weight.copy_(round_to_format(weight, number_format))
    return model


def write_model(
    model: Any,
    path: Path,
    number_format: str = "F32",
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    shards: int = 0,
) -> None:
    """Write a model. metadata: entries to add or replace. extra: more tensors. shards: tensors in a
    file of a split model; 0: one file.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=shards)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if per_token := getattr(config, "num_experts_per_tok", None):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(per_token)
        if width := getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(width)
        if width := getattr(config, "shared_expert_intermediate_size", None):
            writer.add_expert_shared_feed_forward_length(width)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "exaone4":
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config.layer_types])
    for key, value in (metadata or {}).items():
        kind = {int: "uint32", float: "float32", str: "string", list: "array", bool: "bool"}
        getattr(writer, f"add_{kind[type(value)]}")(key, value)
    if "tokenizer.ggml.model" not in (metadata or {}):
        writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(CODES[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        module = name.split(".")[-2]
        value = weight.detach().float()
        if ".experts." in name:
            layer = f"blk.{name.split('.')[2]}.ffn_"
            parts = {"down": value}
            if module == "experts" and name.endswith("gate_up_proj"):
                parts = dict(zip(("gate", "up"), value.chunk(2, dim=1), strict=True))
            for part, matrices in parts.items():
                _add(writer, f"{layer}{part}_exps.weight", matrices, number_format)
            continue
        if name.endswith(ROUTERS):
            rows = value.squeeze(0)  # a shared expert's gate is a vector
            _add(writer, names.get_name(name, (".weight",)), rows, "F32")
            continue
        if architecture in ROTATES_NEIGHBOURS and module in heads:
            value = value.unflatten(0, (heads[module], 2, -1)).transpose(1, 2).flatten(0, 2)
        if architecture.startswith("gemma") and value.ndim == 1:
            value = value + 1
        _add(writer, names.get_name(name, (".weight", ".bias")), value, number_format)
    for name, value in (extra or {}).items():
        _add(writer, name, value, number_format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, value: Tensor, number_format: str) -> None:
    data = value.contiguous().numpy()
    if value.ndim == 1 or number_format == "F32":
        writer.add_tensor(name, data)
        return
    kind = gguf.GGMLQuantizationType[number_format]
    quantised = gguf.quants.quantize(data, kind)
    if number_format == "F16":
        writer.add_tensor(name, quantised)
    else:
        writer.add_tensor(name, quantised, raw_dtype=kind)
