"""Architectures whose keys and values are made of a latent vector, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_architectures.row import Architecture, Settings, Source
from skipsearch.models.loading.gguf_architectures.shared import (
    SCORE_BIAS,
    add_grouped_experts,
    add_sigmoid_experts,
    find_decay,
    list_attending,
    require_value,
)
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile

MAX_WIDTH = 1 << 20
EXPERTS_IN_GROUPS = (160, 256)  # of DeepSeek V2 and V3, whose first files do not name the groups


def _join_latent(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of each head's keys and values.

    parts: keys [heads, latent, key], values [heads, value, latent].
    """
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


LATENT: Mapping[str, Sequence[Source]] = {
    "self_attn.kv_b_proj.weight": [
        Source(("attn_k_b.weight", "attn_v_b.weight"), join=_join_latent),
        Source(("attn_kv_b.weight",)),  # of the first files
    ]
}


def _join_convolutions(parts: Sequence[Tensor]) -> Tensor:
    """Return kernels of queries, keys and values as [channels, 1, width]."""
    return torch.cat([part.flatten(0, -2)[:, None] for part in parts])


KIMI_LINEAR: Mapping[str, Sequence[Source]] = {
    **LATENT,
    **SCORE_BIAS,
    "self_attn.conv1d.weight": [
        Source(
            tuple(f"ssm_conv1d_{part}.weight" for part in ("q", "k", "v")), join=_join_convolutions
        )
    ],
    **find_decay("self_attn.forget_gate"),
    "self_attn.forget_gate.f_a_proj.weight": [Source(("ssm_f_a.weight",))],
    "self_attn.forget_gate.f_b_proj.weight": [Source(("ssm_f_b.weight",))],
}


def add_latent(file: GGUFFile, settings: Settings, value_width: int | None = None) -> None:
    """Add the widths of latents, and of what is made of them.

    value_width: of the values of a head, if a file need not name it.
    """
    name, metadata = str(file.metadata["general.architecture"]), file.metadata
    n_rotary, query = settings["head_dim"], f"{name}.attention.q_lora_rank"

    def read_length(part: str, default: int | None = None) -> int:
        key = f"{name}.attention.{part}_length"
        key = f"{key}_mla" if f"{key}_mla" in metadata else key
        if default is not None and key not in metadata:
            return default
        return file.require_int(key, 1, MAX_WIDTH)

    key_width = read_length("key")
    if key_width <= n_rotary:
        raise GGUFError(
            f"{file.name}: keys of {key_width} numbers have no part that is not turned, since "
            f"{name}.rope.dimension_count is {n_rotary}; download the file again"
        )
    settings |= {
        "num_key_value_heads": settings["num_attention_heads"],
        "q_lora_rank": file.require_int(query, 1, MAX_WIDTH) if query in metadata else None,
        "kv_lora_rank": file.require_int(f"{name}.attention.kv_lora_rank", 1, MAX_WIDTH),
        "qk_rope_head_dim": n_rotary,
        "qk_nope_head_dim": key_width - n_rotary,
        "v_head_dim": read_length("value", value_width),
    }


def _add_deepseek(file: GGUFFile, settings: Settings) -> None:
    add_latent(file, settings)
    require_value(file, "attention.temperature_scale", 0.0)
    rope: dict[str, Any] = settings["rope_parameters"]
    if rope["rope_type"] == "yarn":
        # The factor of the converter. The config of every such model has the number twice.
        multiplier = "deepseek2.rope.scaling.yarn_log_multiplier"
        scale = round(file.require_float(multiplier, None, 1e-9, 1e3) / 0.1, 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}


def _add_deepseek_v2(file: GGUFFile, settings: Settings) -> None:
    _add_deepseek(file, settings)
    if not file.get("deepseek2.expert_count", int, 0):
        settings["first_k_dense_replace"] = settings["num_hidden_layers"]
        return
    require_value(file, "expert_weights_norm", False)
    add_grouped_experts(file, settings)
    _require_groups(file, settings)
    settings |= {
        "n_routed_experts": settings.pop("num_experts"),
        # By the best expert of a group, as its publisher has it. llama.cpp takes the best two.
        "topk_method": "group_limited_greedy" if settings["n_group"] > 1 else "greedy",
    }


def _add_deepseek_v3(file: GGUFFile, settings: Settings) -> None:
    """And GLM 4.7 Flash, which computes the same."""
    _add_deepseek(file, settings)
    add_sigmoid_experts(file, settings)
    _require_groups(file, settings)
    settings["n_routed_experts"] = settings.pop("num_experts")


def _require_groups(file: GGUFFile, settings: Settings) -> None:
    """Raise GGUFError for a file that does not name the groups of its experts."""
    key = "deepseek2.expert_group_count"
    if settings["num_experts"] in EXPERTS_IN_GROUPS and key not in file.metadata:
        raise GGUFError(
            f"{file.name}: {key} is missing, and the router takes experts of groups: take a newer "
            "file of the model"
        )


def _add_minicpm3(file: GGUFFile, settings: Settings) -> None:
    """The factors of embeddings, depth and logits are those of transformers, as in llama.cpp."""
    add_latent(file, settings, settings["hidden_size"] // settings["num_attention_heads"])


def _add_kimi_linear(file: GGUFFile, settings: Settings) -> None:
    """Its keys are not turned, and the part that others turn is there all the same."""
    add_latent(file, settings)
    add_sigmoid_experts(file, settings)
    n_layers, n_dense = settings["num_hidden_layers"], settings.pop("first_k_dense_replace")
    attends = list_attending(file, settings)
    settings |= {
        "norm_topk_prob": True,  # as in llama.cpp
        "layer_types": ["full_attention" if attend else "linear_attention" for attend in attends],
        "mlp_layer_types": ["dense" if i < n_dense else "sparse" for i in range(n_layers)],
        "linear_head_dim": file.require_int("kimi-linear.kda.head_dim", 1, MAX_WIDTH),
        "linear_num_heads": settings["num_attention_heads"],
        "linear_conv_kernel_dim": file.require_int("kimi-linear.ssm.conv_kernel", 2, 1 << 10),
    }


# The name of an architecture in files -> its row.
LATENT_ROWS: dict[str, Architecture] = {
    "deepseek2": Architecture("deepseek_v2", _add_deepseek_v2, LATENT, has_latents=True),
    "minicpm3": Architecture("minicpm3", _add_minicpm3, LATENT, has_latents=True),
    "kimi-linear": Architecture("kimi_linear", _add_kimi_linear, KIMI_LINEAR, has_latents=True),
}
# In files of deepseek2 whose experts a sigmoid scores.
DEEPSEEK_V3 = Architecture(
    "deepseek_v3", _add_deepseek_v3, {**LATENT, **SCORE_BIAS}, has_latents=True
)
