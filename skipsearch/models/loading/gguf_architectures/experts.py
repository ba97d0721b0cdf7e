"""Architectures with experts, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_architectures.dense import add_ernie, add_granite
from skipsearch.models.loading.gguf_architectures.row import Architecture, Settings, Source
from skipsearch.models.loading.gguf_architectures.shared import (
    BY_HALVES,
    SCORE_BIAS,
    add_attention_bias,
    add_experts,
    add_sigmoid_experts,
    list_numbers,
    list_sliding,
    name_of,
    name_sliding,
    require_sigmoid,
    require_value,
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
    add_sigmoid_experts(file, settings)
    settings["n_routed_experts"] = settings.pop("num_experts")
    settings["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _add_dots1(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    add_sigmoid_experts(file, settings)
    settings["n_routed_experts"] = settings.pop("num_experts")
    settings["sliding_window"] = None


def _add_exaone_moe(file: GGUFFile, settings: Settings) -> None:
    add_sigmoid_experts(file, settings)
    n_layers = settings["num_hidden_layers"]
    settings |= {
        "num_shared_experts": settings.pop("n_shared_experts"),
        "sliding_window": file.require_int("exaone-moe.attention.sliding_window"),
        "layer_types": name_sliding(list_sliding(file, n_layers)),
    }


def _add_afmoe(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    add_sigmoid_experts(file, settings)
    require_value(file, "expert_weights_norm", True)
    del settings["norm_topk_prob"]
    settings |= {
        "num_shared_experts": settings.pop("n_shared_experts"),
        "num_dense_layers": settings.pop("first_k_dense_replace"),
        "route_scale": settings.pop("routed_scaling_factor"),
        "sliding_window": file.require_int("afmoe.attention.sliding_window"),
        "mup_enabled": True,  # as in llama.cpp
    }


def _add_mimo2(file: GGUFFile, settings: Settings) -> None:
    add_sigmoid_experts(file, settings, shared=False)
    n_layers, rope = settings["num_hidden_layers"], settings["rope_parameters"]
    slides = list_sliding(file, n_layers)
    key_heads = list_numbers(file, "mimo2.attention.head_count_kv", n_layers)
    n_full = key_heads[slides.index(False)]
    if key_heads != [n_full * (1 + slide) for slide in slides]:
        raise GGUFError(
            f"{file.name}: mimo2.attention.head_count_kv is {str(key_heads)[:40]}, and layers with "
            "a window have to have twice as many as others: take the model's folder instead"
        )
    del settings["first_k_dense_replace"]
    settings |= {
        "n_routed_experts": settings.pop("num_experts"),
        "norm_topk_prob": True,  # as in llama.cpp
        "num_key_value_heads": n_full,
        "v_head_dim": file.require_int("mimo2.attention.value_length", 1, 1 << 16),
        "sliding_window": file.require_int("mimo2.attention.sliding_window"),
        "layer_types": name_sliding(slides),
        "mlp_layer_types": [
            "sparse" if f"blk.{i}.ffn_gate_inp.weight" in file.tensors else "dense"
            for i in range(n_layers)
        ],
        # A model of this family without it is not known, and the first files lack the key.
        "attention_value_scale": file.require_float("mimo2.attention.value_scale", None, 1e-9, 1e9),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                **rope,
                "rope_theta": file.require_float(
                    "mimo2.rope.freq_base_swa", rope["rope_theta"], 1.0, 1e15
                ),
            },
        },
    }
    settings.pop("partial_rotary_factor", None)


def _add_minimax_m2(file: GGUFFile, settings: Settings) -> None:
    require_sigmoid(file)
    add_mixtral(file, settings)
    settings["intermediate_size"] = file.require_int("minimax-m2.expert_feed_forward_length")


def _add_hunyuan_moe(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    add_experts(file, settings, True)
    del settings["norm_topk_prob"]
    settings["intermediate_size"] = file.require_int("hunyuan-moe.expert_feed_forward_length")


def _add_ernie_moe(file: GGUFFile, settings: Settings) -> None:
    add_ernie(file, settings)
    add_experts(file, settings, True)
    del settings["norm_topk_prob"]
    settings |= {
        "moe_intermediate_size": file.require_int("ernie4_5-moe.expert_feed_forward_length"),
        "moe_num_shared_experts": file.get("ernie4_5-moe.expert_shared_count", int, 0),
        "moe_layer_start_index": file.get("ernie4_5-moe.leading_dense_block_count", int, 0),
        "moe_layer_interval": file.require_int("ernie4_5-moe.interleave_moe_layer_step", 1, 1024),
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
    "glm4moe": Architecture("glm4_moe", _add_glm4_moe, SCORE_BIAS, partly_rotated=True),
    "gpt-oss": Architecture("gpt_oss", _add_gpt_oss, GPT_OSS),
    "dots1": Architecture("dots1", _add_dots1, SCORE_BIAS),
    "exaone-moe": Architecture("exaone_moe", _add_exaone_moe, SCORE_BIAS),
    "afmoe": Architecture("afmoe", _add_afmoe, SCORE_BIAS),
    "mimo2": Architecture(
        "mimo_v2_flash",
        _add_mimo2,
        {**SCORE_BIAS, "self_attn.sinks": GPT_OSS["self_attn.sinks"]},
        partly_rotated=True,
        layers_differ=True,
        values_differ=True,
        windows_turn=True,
    ),
    "minimax-m2": Architecture("minimax_m2", _add_minimax_m2, SCORE_BIAS, partly_rotated=True),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", _add_hunyuan_moe),
    "ernie4_5-moe": Architecture("ernie4_5_moe", _add_ernie_moe, SCORE_BIAS),
}
MIXTRAL = Architecture("mixtral", add_mixtral, BY_HALVES)  # in files of llama
