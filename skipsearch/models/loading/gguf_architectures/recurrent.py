"""Architectures with recurrent layers, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_architectures.dense import add_granite
from skipsearch.models.loading.gguf_architectures.experts import (
    GRANITE_MOE,
    add_mixtral,
    add_widths,
)
from skipsearch.models.loading.gguf_architectures.row import Architecture, Settings, Source
from skipsearch.models.loading.gguf_architectures.shared import (
    add_attention_bias,
    add_experts,
    add_grouped_experts,
    find_decay,
    group_by_key_head,
    list_attending,
    list_numbers,
    log_of_negative,
    name_of,
)
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile

QWEN_PERIOD = 4  # the last of as many layers attends, the others are recurrent


def _order_value_heads(config: Any, length: int) -> Tensor:
    """Return the order of values of delta nets: in files, heads of one key are not neighbours."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return torch.arange(length).view(values // keys, keys, -1).transpose(0, 1).flatten()


def _order_values_after_keys(config: Any, length: int) -> Tensor:
    n_first = 2 * config.linear_num_key_heads * config.linear_key_head_dim  # queries and keys
    values = _order_value_heads(config, length - n_first)
    return torch.cat([torch.arange(n_first), n_first + values])


def _order_by_key_head(config: Any, length: int) -> Tensor:
    """Return the order of rows that files have as queries, keys, values, gates."""
    keys = config.linear_num_key_heads
    widths = [keys * config.linear_key_head_dim] * 2
    widths += [(length - sum(widths)) // 2] * 2
    return group_by_key_head(length, widths, keys)


QWEN3_NEXT: Mapping[str, Sequence[Source]] = {
    **find_decay("linear_attn"),
    "linear_attn.in_proj_qkvz.weight": [
        Source(("attn_qkv.weight", "attn_gate.weight"), rows=_order_by_key_head),
        Source(("ssm_in.weight",)),  # of the first files
    ],
}
QWEN35: Mapping[str, Sequence[Source]] = {
    "linear_attn.A_log": [Source(("ssm_a",), rows=_order_value_heads, join=log_of_negative)],
    "linear_attn.out_proj.weight": [Source(("ssm_out.weight",), columns=_order_value_heads)],
    **{
        f"linear_attn.{name}": [Source((tensor,), rows=order)]
        for name, tensor, order in (
            ("dt_bias", "ssm_dt.bias", _order_value_heads),
            ("in_proj_z.weight", "attn_gate.weight", _order_value_heads),
            ("in_proj_a.weight", "ssm_alpha.weight", _order_value_heads),
            ("in_proj_b.weight", "ssm_beta.weight", _order_value_heads),
            ("in_proj_qkv.weight", "attn_qkv.weight", _order_values_after_keys),
            ("conv1d.weight", "ssm_conv1d.weight", _order_values_after_keys),
        )
    },
}
LFM2: Mapping[str, Sequence[Source]] = {
    "model.embedding_norm.weight": [
        Source(("token_embd_norm.weight",)),  # the norm before the head, in spite of its name
        Source(("output_norm.weight",)),
    ],
    "feed_forward.expert_bias": [Source(("exp_probs_b.bias",))],
}
MAMBA, MIXER = find_decay("mamba"), find_decay("mixer")
GRANITE_HYBRID: Mapping[str, Sequence[Source]] = {
    **GRANITE_MOE,
    **MAMBA,
    "shared_mlp.input_linear.weight": [
        Source(("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
        Source(("ffn_gate.weight", "ffn_up.weight")),  # without experts
    ],
    "shared_mlp.output_linear.weight": [
        Source(("ffn_down_shexp.weight",)),
        Source(("ffn_down.weight",)),
    ],
}
NEMOTRON_H: Mapping[str, Sequence[Source]] = {
    "model.embeddings.weight": [Source(("token_embd.weight",))],
    "model.norm_f.weight": [Source(("output_norm.weight",))],
    "norm.weight": [Source(("attn_norm.weight",))],  # of whatever sub-layer
    **MIXER,
    **{
        f"mixer.{name}": [Source((tensor,))]
        for name, tensor in (
            ("D", "ssm_d"),
            ("conv1d.weight", "ssm_conv1d.weight"),
            ("conv1d.bias", "ssm_conv1d.bias"),
            ("in_proj.weight", "ssm_in.weight"),
            ("norm.weight", "ssm_norm.weight"),
            ("out_proj.weight", "ssm_out.weight"),
            ("q_proj.weight", "attn_q.weight"),
            ("k_proj.weight", "attn_k.weight"),
            ("v_proj.weight", "attn_v.weight"),
            ("o_proj.weight", "attn_output.weight"),
            ("up_proj.weight", "ffn_up.weight"),
            ("down_proj.weight", "ffn_down.weight"),
            ("gate.weight", "ffn_gate_inp.weight"),
            ("gate.e_score_correction_bias", "exp_probs_b.bias"),
            ("shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
            ("shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
        )
    },
}


def _add_lfm2(file: GGUFFile, settings: Settings) -> None:
    attends = list_attending(file, settings)
    settings |= {
        "layer_types": ["full_attention" if attend else "conv" for attend in attends],
        "conv_L_cache": file.require_int(f"{name_of(file)}.shortconv.l_cache", 2, 1 << 10),
        "norm_eps": settings.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def _add_lfm2_moe(file: GGUFFile, settings: Settings) -> None:
    _add_lfm2(file, settings)
    add_experts(file, settings, True)
    n_layers = settings["num_hidden_layers"]
    n_dense = file.get("lfm2moe.leading_dense_block_count", int, 0)
    settings |= {
        "num_dense_layers": n_dense,
        "moe_intermediate_size": file.require_int("lfm2moe.expert_feed_forward_length"),
        "use_expert_bias": f"blk.{n_layers - 1}.exp_probs_b.bias" in file.tensors,
    }


def _add_delta_net(file: GGUFFile, settings: Settings) -> None:
    """Add the recurrent layers of Qwen3-Next and Qwen3.5."""
    name, n_layers = name_of(file), settings["num_hidden_layers"]
    n_values = file.require_int(f"{name}.ssm.time_step_rank", 1, 1 << 16)
    n_keys = file.require_int(f"{name}.ssm.group_count", 1, n_values)
    if n_values % n_keys:
        raise GGUFError(
            f"{file.name}: {name}.ssm.time_step_rank is {n_values}, no multiple of its {n_keys} "
            "key heads; download the file again"
        )
    period = file.get(f"{name}.full_attention_interval", int, QWEN_PERIOD)
    recurs = file.metadata.get(f"{name}.attention.recurrent_layers")
    if not isinstance(recurs, list):
        recurs = [(i + 1) % max(period, 1) != 0 for i in range(n_layers)]
    settings |= {
        "layer_types": [
            "linear_attention" if recur else "full_attention" for recur in recurs[:n_layers]
        ],
        "linear_conv_kernel_dim": file.require_int(f"{name}.ssm.conv_kernel", 1, 1 << 10),
        "linear_key_head_dim": file.require_int(f"{name}.ssm.state_size", 1, 1 << 16),
        "linear_num_key_heads": n_keys,
        "linear_num_value_heads": n_values,
        "linear_value_head_dim": file.require_int(f"{name}.ssm.inner_size") // n_values,
    }


def _add_delta_net_moe(file: GGUFFile, settings: Settings) -> None:
    _add_delta_net(file, settings)
    add_experts(file, settings, True)
    add_widths(file, settings)


def _add_granite_hybrid(file: GGUFFile, settings: Settings) -> None:
    add_granite(file, settings)
    attends, hidden_size = list_attending(file, settings), settings["hidden_size"]
    n_heads = file.require_int("granitehybrid.ssm.time_step_rank", 1, 1 << 16)
    inner_size = file.require_int("granitehybrid.ssm.inner_size", hidden_size)
    shared = (file.tensors.get(f"blk.0.{name}.weight") for name in ("ffn_gate_shexp", "ffn_gate"))
    width = next((tensor.shape[0] for tensor in shared if tensor is not None), 1)
    # llama.cpp turns queries and keys unless the file says that it does not.
    turns = file.metadata.get("granitehybrid.rope.scaling.finetuned", True)
    has_experts = file.get("granitehybrid.expert_count", int, 0) > 0
    if has_experts:
        add_mixtral(file, settings)
    else:
        settings["num_local_experts"] = 0
    settings |= {
        "layer_types": ["full_attention" if attend else "linear_attention" for attend in attends],
        "position_embedding_type": "rope" if turns else None,
        "shared_intermediate_size": width,
        "mamba_n_heads": n_heads,
        "mamba_n_groups": file.require_int("granitehybrid.ssm.group_count", 1, n_heads),
        "mamba_d_state": file.require_int("granitehybrid.ssm.state_size", 1, 1 << 16),
        "mamba_d_conv": file.require_int("granitehybrid.ssm.conv_kernel", 1, 1 << 10),
        "mamba_d_head": inner_size // n_heads,
        "mamba_expand": inner_size // hidden_size,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
    }


def _add_nemotron_h(file: GGUFFile, settings: Settings) -> None:
    name, attends = name_of(file), list_attending(file, settings)
    widths = list_numbers(file, f"{name}.feed_forward_length", settings["num_hidden_layers"])
    has_experts = file.get(f"{name}.expert_count", int, 0) > 0
    n_heads = file.require_int(f"{name}.ssm.time_step_rank", 1, 1 << 16)
    kinds = [
        "full_attention"
        if attend
        else ("moe" if has_experts else "mlp")
        if width
        else "linear_attention"
        for attend, width in zip(attends, widths, strict=True)
    ]
    settings |= {
        "layers_block_type": kinds,
        "layer_norm_epsilon": settings["layer_norm_eps"],
        "mamba_num_heads": n_heads,
        "mamba_head_dim": file.require_int(f"{name}.ssm.inner_size", n_heads) // n_heads,
        "n_groups": file.require_int(f"{name}.ssm.group_count", 1, n_heads),
        "ssm_state_size": file.require_int(f"{name}.ssm.state_size", 1, 1 << 16),
        "conv_kernel": file.require_int(f"{name}.ssm.conv_kernel", 2, 1 << 10),
        "use_conv_bias": any(tensor.endswith("ssm_conv1d.bias") for tensor in file.tensors),
        # No bound, as in llama.cpp and in passes of transformers over one token.
        "time_step_min": 1e-30,
    }
    if has_experts:
        add_grouped_experts(file, settings)
        del settings["first_k_dense_replace"]
        settings |= {
            "n_routed_experts": settings.pop("num_experts"),
            "moe_shared_expert_intermediate_size": file.require_int(
                f"{name}.expert_shared_feed_forward_length"
            ),
            "moe_latent_size": file.get(f"{name}.moe_latent_size", int, 0) or None,
        }


def _read_mamba(file: GGUFFile) -> dict[str, int]:
    """Return the sizes of Mamba layers by the names that most families have for them."""
    name = name_of(file)
    n_heads = file.require_int(f"{name}.ssm.time_step_rank", 1, 1 << 16)
    return {
        "n_heads": n_heads,
        "n_groups": file.get(f"{name}.ssm.group_count", int, 1),
        "d_inner": file.require_int(f"{name}.ssm.inner_size", n_heads),
        "d_state": file.require_int(f"{name}.ssm.state_size", 1, 1 << 16),
        "d_conv": file.require_int(f"{name}.ssm.conv_kernel", 2, 1 << 10),
    }


def _add_falcon_h1(file: GGUFFile, settings: Settings) -> None:
    """The factors of the config are part of the matrices in files."""
    if settings["tie_word_embeddings"]:
        raise GGUFError(
            f"{file.name} has no tensor output.weight, and the factor of its logits is in no other "
            "place: take the model's folder instead"
        )
    add_attention_bias(file, settings)
    sizes = _read_mamba(file)
    settings |= {
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "mamba_d_ssm": sizes["d_inner"],
        "mamba_d_head": sizes["d_inner"] // sizes["n_heads"],
        "mamba_n_heads": sizes["n_heads"],
        "mamba_n_groups": sizes["n_groups"],
        "mamba_d_state": sizes["d_state"],
        "mamba_d_conv": sizes["d_conv"],
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
    }


def _add_mamba2(file: GGUFFile, settings: Settings) -> None:
    sizes = _add_mamba_alone(file, settings)
    settings |= {
        "num_heads": sizes["n_heads"],
        "head_dim": sizes["d_inner"] // sizes["n_heads"],
        "n_groups": sizes["n_groups"],
    }


def _add_mamba(file: GGUFFile, settings: Settings) -> None:
    settings["time_step_rank"] = _add_mamba_alone(file, settings)["n_heads"]


def _add_mamba_alone(file: GGUFFile, settings: Settings) -> dict[str, int]:
    """Add what a model of Mamba layers alone has. Return the sizes of its layers."""
    sizes = _read_mamba(file)
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        del settings[name]
    settings |= {
        "layer_norm_epsilon": settings.pop("rms_norm_eps"),
        "state_size": sizes["d_state"],
        "conv_kernel": sizes["d_conv"],
        "expand": sizes["d_inner"] // settings["hidden_size"],
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }
    return sizes


def _add_jamba(file: GGUFFile, settings: Settings) -> None:
    sizes, n_layers = _read_mamba(file), settings["num_hidden_layers"]
    routes = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(n_layers)]
    if any(routes):
        add_experts(file, settings, False)
    else:
        settings["num_experts"] = 1
    for name, flags in (("attn", list_attending(file, settings)), ("expert", routes)):
        settings[f"{name}_layer_period"], settings[f"{name}_layer_offset"] = _find_period(
            file, flags
        )
    settings |= {
        "mamba_dt_rank": sizes["n_heads"],
        "mamba_d_state": sizes["d_state"],
        "mamba_d_conv": sizes["d_conv"],
        "mamba_expand": sizes["d_inner"] // settings["hidden_size"],
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
    }


def _find_period(file: GGUFFile, flags: list[bool]) -> tuple[int, int]:
    """Return (period, first) of the layers with a flag. Raises: GGUFError if they have none."""
    layers = [i for i, flag in enumerate(flags) if flag]
    period = layers[1] - layers[0] if len(layers) > 1 else len(flags) + 1
    first = layers[0] if layers else len(flags)
    if flags != [i % period == first for i in range(len(flags))]:
        raise GGUFError(
            f"{file.name}: the layers {str(layers)[:40]}, which attend or have experts, follow no "
            "period: take the model's folder instead"
        )
    return period, first


# The name of an architecture in files -> its row.
RECURRENT: dict[str, Architecture] = {
    "granitehybrid": Architecture("granitemoehybrid", _add_granite_hybrid, GRANITE_HYBRID),
    # Queries and keys are not turned, whatever the file says. The key of its epsilon is that of
    # layer norms, and the norms are RMS norms.
    **{
        name: Architecture(
            "nemotron_h", _add_nemotron_h, NEMOTRON_H, has_layer_norms=True, partly_rotated=True
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "falcon-h1": Architecture("falcon_h1", _add_falcon_h1, MAMBA),
    "mamba": Architecture("mamba", _add_mamba, MIXER, attends=False),
    "mamba2": Architecture("mamba2", _add_mamba2, MIXER, attends=False),
    "jamba": Architecture("jamba", _add_jamba, MAMBA),
    "lfm2": Architecture("lfm2", _add_lfm2, LFM2),
    "lfm2moe": Architecture("lfm2_moe", _add_lfm2_moe, LFM2),
    "qwen35": Architecture(
        "qwen3_5_text", _add_delta_net, QWEN35, norms_plus_one=True, partly_rotated=True
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", _add_delta_net_moe, QWEN35, norms_plus_one=True, partly_rotated=True
    ),
    "qwen3next": Architecture(
        "qwen3_next", _add_delta_net_moe, QWEN3_NEXT, norms_plus_one=True, partly_rotated=True
    ),
}
FALCON_MAMBA = Architecture("falcon_mamba", _add_mamba, MIXER, attends=False)  # in files of mamba
