"""Architectures with experts, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_architectures.dense import add_granite
from skipsearch.models.loading.gguf_architectures.row import Architecture, Settings, Source
from skipsearch.models.loading.gguf_architectures.shared import (
    BY_HALVES,
    MAX_EXPERTS,
    SIGMOID,
    add_attention_bias,
    add_experts,
    name_of,
)
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile


def _alternate(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts), dim=-1).flatten(-2)


GPT_OSS: Mapping[str, Sequence[Source]] = {
    "self_attn.sinks": [Source(("attn_sinks.weight",))],
    "mlp.experts.gate_up_proj_bias": [
        Source(("ffn_gate_exps.bias", "ffn_up_exps.bias"), join=_alternate)
    ],
    "mlp.experts.down_proj_bias": [Source(("ffn_down_exps.bias",))],
}


GLM4_MOE: Mapping[str, Sequence[Source]] = {
    "mlp.gate.e_score_correction_bias": [Source(("exp_probs_b.bias",))]
}


GRANITE_MOE: Mapping[str, Sequence[Source]] = {
    **BY_HALVES,
    "block_sparse_moe.router.weight": [Source(("ffn_gate_inp.weight",))],
}


def add_mixtral(file: GGUFFile, settings: Settings) -> None:
    add_experts(file, settings, True)
    settings["num_local_experts"] = settings.pop("num_experts")
    del settings["norm_topk_prob"]


def add_granite_moe(file: GGUFFile, settings: Settings) -> None:
    add_granite(file, settings)
    add_mixtral(file, settings)


def _add_glm4_moe(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    add_experts(file, settings, file.metadata.get("glm4moe.expert_weights_norm") is True)
    if (scores := file.get("glm4moe.expert_gating_func", int, 0)) not in (0, SIGMOID):
        raise GGUFError(
            f"{file.name}: glm4moe.expert_gating_func is {scores}, and files are read only if it "
            f"is {SIGMOID}: take the model's folder instead"
        )
    settings |= {
        "n_routed_experts": settings.pop("num_experts"),
        "n_shared_experts": file.require_int("glm4moe.expert_shared_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": file.require_int("glm4moe.expert_feed_forward_length"),
        "first_k_dense_replace": file.get("glm4moe.leading_dense_block_count", int, 0),
        "routed_scaling_factor": file.require_float("glm4moe.expert_weights_scale", 1.0, 1e-9, 1e9),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _add_gpt_oss(file: GGUFFile, settings: Settings) -> None:
    add_mixtral(file, settings)
    add_attention_bias(file, settings)
    settings |= {
        "intermediate_size": file.require_int("gpt-oss.expert_feed_forward_length"),
        "sliding_window": file.require_int("gpt-oss.attention.sliding_window"),
    }
    if settings["rope_parameters"]["rope_type"] == "yarn":
        settings["rope_parameters"]["truncate"] = False  # as its publisher's config has it


def _add_qwen3_moe(file: GGUFFile, settings: Settings) -> None:
    add_experts(file, settings, True)
    settings["moe_intermediate_size"] = file.require_int(
        f"{name_of(file)}.expert_feed_forward_length"
    )
    add_attention_bias(file, settings)


def _add_qwen2_moe(file: GGUFFile, settings: Settings) -> None:
    add_experts(file, settings, False)
    add_widths(file, settings)
    settings["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors


def add_widths(file: GGUFFile, settings: Settings) -> None:
    """Add the widths of experts and of the shared one."""
    width, per_token = settings["intermediate_size"], settings["num_experts_per_tok"]
    for setting, name, default in (  # the defaults are llama.cpp's
        ("moe_intermediate_size", "expert_feed_forward_length", width // per_token),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length", width),
    ):
        key = f"{name_of(file)}.{name}"
        settings[setting] = file.require_int(key) if key in file.metadata else default


def _add_olmoe(file: GGUFFile, settings: Settings) -> None:
    add_experts(file, settings, False)


# The name of an architecture in files -> its row.
EXPERTS: dict[str, Architecture] = {
    "granitemoe": Architecture("granitemoe", add_granite_moe, GRANITE_MOE),
    "olmoe": Architecture("olmoe", _add_olmoe),
    "qwen2moe": Architecture("qwen2_moe", _add_qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _add_qwen3_moe),
    "qwen3vlmoe": Architecture("qwen3_moe", _add_qwen3_moe),
    "glm4moe": Architecture("glm4_moe", _add_glm4_moe, GLM4_MOE, partly_rotated=True),
    "gpt-oss": Architecture("gpt_oss", _add_gpt_oss, GPT_OSS),
}
MIXTRAL = Architecture("mixtral", add_mixtral, BY_HALVES)  # in files of llama
