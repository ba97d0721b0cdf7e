"""The architectures of GGUF files that are read, one row each: which family of transformers a file
is, which settings only that family has, and where the file has its tensors.

Names, orders and values are those of llama.cpp: gguf-py/gguf/constants.py and conversion/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile

MAX_EXPERTS = 1 << 16
EXAONE4_PERIOD = 4  # the last of as many layers sees all of the text
QWEN_PERIOD = 4  # the last of as many layers attends, the others are recurrent
GEMMA2_27B_LAYERS = 46  # attention is scaled by the width of all heads in these two alone
GEMMA3_27B_LAYERS = 62
SIGMOID = 2  # of llama.cpp's functions that score experts

Settings = dict[str, Any]
Order = Callable[[Any, int], Tensor]  # (config, length n) -> [n], where each one is in the file


@dataclass(frozen=True)
class Source:
    """Tensors of a file that make a parameter of transformers.

    join: makes it from several tensors; None: their rows, one tensor after the other. rows,
    columns: the order in the file; None: the same. A layer's tensors are named without `blk.N.`.
    """

    tensors: tuple[str, ...]
    rows: Order | None = None
    columns: Order | None = None
    join: Callable[[Sequence[Tensor]], Tensor] | None = None


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    model_type: of transformers. add_settings: what the config needs besides the settings that all
    architectures have. sources: for parameters, named from their layer on, the first whose tensors
    are in the file; for all others the names of `gguf` are those of the file.
    """

    model_type: str
    add_settings: Callable[[GGUFFile, Settings], None]
    sources: Mapping[str, Sequence[Source]] = field(default_factory=dict)
    norms_plus_one: bool = False  # norms multiply by 1 + weight; files hold the sum
    has_layer_norms: bool = False  # and not RMS norms
    partly_rotated: bool = False  # a part of each row of queries and keys may be rotated
    layers_differ: bool = False  # in numbers that `add_settings` reads again


def _order_by_halves(heads_key: str) -> Order:
    """Return the order of rows of which neighbours rotate together in files, and halves here."""

    def order(config: Any, length: int) -> Tensor:
        heads = getattr(config, heads_key)
        return torch.arange(length).view(heads, -1, 2).transpose(1, 2).flatten()

    return order


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
    parts = torch.arange(length).split(widths)
    return torch.cat([part.view(keys, -1) for part in parts], dim=1).flatten()


def _log_of_negative(parts: Sequence[Tensor]) -> Tensor:
    return (-parts[0]).log()


def _alternate(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts), dim=-1).flatten(-2)


BY_HALVES: Mapping[str, Sequence[Source]] = {
    f"self_attn.{part}_proj.{kind}": [
        Source((f"attn_{part}.{kind}",), rows=_order_by_halves(heads_key))
    ]
    for part, heads_key in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}
DELTA_NET: Mapping[str, Sequence[Source]] = {
    "linear_attn.A_log": [Source(("ssm_a",), join=_log_of_negative)],
    "linear_attn.dt_bias": [Source(("ssm_dt.bias",))],
}
QWEN3_NEXT: Mapping[str, Sequence[Source]] = {
    **DELTA_NET,
    "linear_attn.in_proj_qkvz.weight": [
        Source(("attn_qkv.weight", "attn_gate.weight"), rows=_order_by_key_head),
        Source(("ssm_in.weight",)),  # of the first files
    ],
}
QWEN35: Mapping[str, Sequence[Source]] = {
    "linear_attn.A_log": [Source(("ssm_a",), rows=_order_value_heads, join=_log_of_negative)],
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
GPT_OSS: Mapping[str, Sequence[Source]] = {
    "self_attn.sinks": [Source(("attn_sinks.weight",))],
    "mlp.experts.gate_up_proj_bias": [
        Source(("ffn_gate_exps.bias", "ffn_up_exps.bias"), join=_alternate)
    ],
    "mlp.experts.down_proj_bias": [Source(("ffn_down_exps.bias",))],
}
LFM2: Mapping[str, Sequence[Source]] = {
    "model.embedding_norm.weight": [
        Source(("token_embd_norm.weight",)),  # the norm before the head, in spite of its name
        Source(("output_norm.weight",)),
    ],
    "feed_forward.expert_bias": [Source(("exp_probs_b.bias",))],
}
GLM4_MOE: Mapping[str, Sequence[Source]] = {
    "mlp.gate.e_score_correction_bias": [Source(("exp_probs_b.bias",))]
}
GRANITE_MOE: Mapping[str, Sequence[Source]] = {
    **BY_HALVES,
    "block_sparse_moe.router.weight": [Source(("ffn_gate_inp.weight",))],
}
GRANITE_HYBRID: Mapping[str, Sequence[Source]] = {
    **GRANITE_MOE,
    "mamba.A_log": [Source(("ssm_a",), join=_log_of_negative)],
    "mamba.dt_bias": [Source(("ssm_dt.bias",))],
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
    "mixer.A_log": [Source(("ssm_a",), join=_log_of_negative)],
    "mixer.dt_bias": [Source(("ssm_dt.bias",))],
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


GEMMA4: Mapping[str, Sequence[Source]] = {
    "layer_scalar": [Source(("layer_output_scale.weight",))],
    "router.scale": [Source(("ffn_gate_inp.scale",))],
    "router.per_expert_scale": [Source(("ffn_down_exps.scale",))],
}


def _name_of(file: GGUFFile) -> str:
    return str(file.metadata["general.architecture"])


def _list_numbers(file: GGUFFile, key: str, n_layers: int) -> list[Any]:
    """Return the numbers of a key, one for each layer of the model. Raises: GGUFError."""
    name = _name_of(file)
    numbers = file.metadata.get(f"{name}.{key}")
    n_blocks = n_layers + file.get(f"{name}.nextn_predict_layers", int, 0)  # and draft heads
    if not isinstance(numbers, list) or len(numbers) != n_blocks:
        raise GGUFError(
            f"{file.name}: {name}.{key} has to be a list of {n_blocks} numbers, one for each "
            "layer; download the file again"
        )
    return numbers[:n_layers]


def _list_attending(file: GGUFFile, settings: Settings) -> list[bool]:
    """Return which layers attend, by their numbers of heads for keys. Raises: GGUFError."""
    numbers = _list_numbers(file, "attention.head_count_kv", settings["num_hidden_layers"])
    return [bool(number) for number in numbers]


def _add_granite(file: GGUFFile, settings: Settings) -> None:
    _add_attention_bias(file, settings)
    for setting, key, neutral in (
        ("attention_multiplier", "attention.scale", settings["head_dim"] ** -0.5),
        ("embedding_multiplier", "embedding_scale", 1.0),
        ("residual_multiplier", "residual_scale", 1.0),
        ("logits_scaling", "logit_scale", 1.0),
    ):
        settings[setting] = file.require_float(f"{_name_of(file)}.{key}", neutral, 1e-9, 1e9)


def _add_granite_moe(file: GGUFFile, settings: Settings) -> None:
    _add_granite(file, settings)
    _add_mixtral(file, settings)


def _add_glm4(file: GGUFFile, settings: Settings) -> None:
    _add_attention_bias(file, settings)
    if any(file.get("glm4.rope.dimension_sections", list, [])):
        raise GGUFError(
            f"{file.name}: glm4.rope.dimension_sections says that it is the text part of a model "
            "that sees, whose rows have another order, and those are not read: take the model's "
            "folder instead"
        )


def _add_seed_oss(file: GGUFFile, settings: Settings) -> None:
    _add_attention_bias(file, settings)
    settings["attention_out_bias"] = "blk.0.attn_output.bias" in file.tensors


def _add_mistral3(file: GGUFFile, settings: Settings) -> None:
    rope = settings["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise GGUFError(
            f"{file.name}: mistral3.rope.scaling.type has to be yarn; download the file again"
        )
    # Of equal numbers, the scale of the rotated halves is 1, as llama.cpp has it.
    magnitude = file.require_float("mistral3.rope.scaling.yarn_log_multiplier", 1.0, 1e-9, 1e9)
    rope |= {
        "mscale": magnitude,
        "mscale_all_dim": magnitude,
        "llama_4_scaling_beta": file.require_float(
            "mistral3.attention.temperature_scale", 0.0, 0.0, 1e3
        ),
    }


def _add_ernie(file: GGUFFile, settings: Settings) -> None:
    settings["use_bias"] = "blk.0.attn_q.bias" in file.tensors


def _add_olmo3(file: GGUFFile, settings: Settings) -> None:
    rope = settings["rope_parameters"]
    settings |= {
        "sliding_window": file.require_int("olmo2.attention.sliding_window"),
        "layer_types": _name_sliding(_list_sliding(file, "olmo2", settings["num_hidden_layers"])),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        },
    }


def _add_exaone4(file: GGUFFile, settings: Settings) -> None:
    n_layers = settings["num_hidden_layers"]
    window = file.get("exaone4.attention.sliding_window", int, 0) or None
    slides = file.metadata.get("exaone4.attention.sliding_window_pattern")
    if not isinstance(slides, list):  # as in llama.cpp, which asks for the window alone
        slides = [bool(window) and i % EXAONE4_PERIOD < EXAONE4_PERIOD - 1 for i in range(n_layers)]
    if len(slides) != n_layers or (any(slides) and window is None):
        raise GGUFError(
            f"{file.name}: exaone4.attention.sliding_window_pattern does not fit its "
            f"{n_layers} layers and the window {window}; download the file again"
        )
    settings["sliding_window"] = window
    settings["layer_types"] = _name_sliding(slides)


def _add_attention_bias(file: GGUFFile, settings: Settings) -> None:
    settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _add_phi3(file: GGUFFile, settings: Settings) -> None:
    settings["sliding_window"] = file.get("phi3.attention.sliding_window", int, 0) or None
    settings["pad_token_id"] = settings["pad_token_id"] or 0


def _add_gemma(file: GGUFFile, settings: Settings) -> None:
    settings["hidden_act"] = settings["hidden_activation"] = "gelu_pytorch_tanh"


def _add_gemma3(file: GGUFFile, settings: Settings) -> None:
    rope = settings.pop("rope_parameters")
    scalar = settings["head_dim"]
    if settings["num_hidden_layers"] == GEMMA3_27B_LAYERS:
        scalar = settings["hidden_size"] // settings["num_attention_heads"]
    settings |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.require_int("gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping", float, 0.0) or None,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.require_float("gemma3.rope.freq_base_swa", 1e4, 1.0, 1e15),
            },
        },
    }


def _add_gemma2(file: GGUFFile, settings: Settings) -> None:
    scalar = settings["head_dim"]
    if settings["num_hidden_layers"] == GEMMA2_27B_LAYERS:
        scalar = settings["hidden_size"] // settings["num_attention_heads"]
    caps = {
        setting: file.require_float(f"gemma2.{setting}", default, 1e-3, 1e6)
        for setting, default in (
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
        )
    }
    settings |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.get("gemma2.attention.sliding_window", int, 4096),
        "query_pre_attn_scalar": scalar,
        **caps,
    }


def _add_cohere(file: GGUFFile, settings: Settings) -> None:
    settings["logit_scale"] = file.require_float("command-r.logit_scale", None, 1e-9, 1e9)
    settings["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    _add_attention_bias(file, settings)


def _add_cohere2(file: GGUFFile, settings: Settings) -> None:
    settings["logit_scale"] = file.require_float("cohere2.logit_scale", None, 1e-9, 1e9)
    settings["sliding_window"] = file.require_int("cohere2.attention.sliding_window")
    _add_attention_bias(file, settings)


def _add_lfm2(file: GGUFFile, settings: Settings) -> None:
    attends = _list_attending(file, settings)
    settings |= {
        "layer_types": ["full_attention" if attend else "conv" for attend in attends],
        "conv_L_cache": file.require_int(f"{_name_of(file)}.shortconv.l_cache", 2, 1 << 10),
        "norm_eps": settings.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def _add_lfm2_moe(file: GGUFFile, settings: Settings) -> None:
    _add_lfm2(file, settings)
    _add_experts(file, settings, True)
    n_layers = settings["num_hidden_layers"]
    n_dense = file.get("lfm2moe.leading_dense_block_count", int, 0)
    settings |= {
        "num_dense_layers": n_dense,
        "moe_intermediate_size": file.require_int("lfm2moe.expert_feed_forward_length"),
        "use_expert_bias": f"blk.{n_layers - 1}.exp_probs_b.bias" in file.tensors,
    }


def _add_delta_net(file: GGUFFile, settings: Settings) -> None:
    """Add the recurrent layers of Qwen3-Next and Qwen3.5."""
    name, n_layers = _name_of(file), settings["num_hidden_layers"]
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
    _add_experts(file, settings, True)
    _add_widths(file, settings)


def _add_glm4_moe(file: GGUFFile, settings: Settings) -> None:
    _add_attention_bias(file, settings)
    _add_experts(file, settings, file.metadata.get("glm4moe.expert_weights_norm") is True)
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
    _add_mixtral(file, settings)
    _add_attention_bias(file, settings)
    settings |= {
        "intermediate_size": file.require_int("gpt-oss.expert_feed_forward_length"),
        "sliding_window": file.require_int("gpt-oss.attention.sliding_window"),
    }
    if settings["rope_parameters"]["rope_type"] == "yarn":
        settings["rope_parameters"]["truncate"] = False  # as its publisher's config has it


def _add_granite_hybrid(file: GGUFFile, settings: Settings) -> None:
    _add_granite(file, settings)
    attends, hidden_size = _list_attending(file, settings), settings["hidden_size"]
    n_heads = file.require_int("granitehybrid.ssm.time_step_rank", 1, 1 << 16)
    inner_size = file.require_int("granitehybrid.ssm.inner_size", hidden_size)
    shared = (file.tensors.get(f"blk.0.{name}.weight") for name in ("ffn_gate_shexp", "ffn_gate"))
    width = next((tensor.shape[0] for tensor in shared if tensor is not None), 1)
    # llama.cpp turns queries and keys unless the file says that it does not.
    turns = file.metadata.get("granitehybrid.rope.scaling.finetuned", True)
    has_experts = file.get("granitehybrid.expert_count", int, 0) > 0
    if has_experts:
        _add_mixtral(file, settings)
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
    name, attends = _name_of(file), _list_attending(file, settings)
    widths = _list_numbers(file, "feed_forward_length", settings["num_hidden_layers"])
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
        _add_experts(file, settings, file.metadata.get(f"{name}.expert_weights_norm") is True)
        settings |= {
            "n_routed_experts": settings.pop("num_experts"),
            "n_shared_experts": file.require_int(f"{name}.expert_shared_count", 1, MAX_EXPERTS),
            "moe_intermediate_size": file.require_int(f"{name}.expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": file.require_int(
                f"{name}.expert_shared_feed_forward_length"
            ),
            "moe_latent_size": file.get(f"{name}.moe_latent_size", int, 0) or None,
            "routed_scaling_factor": file.require_float(
                f"{name}.expert_weights_scale", 1.0, 1e-9, 1e9
            ),
            "n_group": file.get(f"{name}.expert_group_count", int, 1),
            "topk_group": file.get(f"{name}.expert_group_used_count", int, 1),
        }


def _add_gemma4(file: GGUFFile, settings: Settings) -> None:
    n_layers, full_rope = settings["num_hidden_layers"], settings["rope_parameters"]
    slides, names = _list_sliding(file, "gemma4", n_layers), file.tensors
    n_shared = file.get("gemma4.attention.shared_kv_layers", int, 0)
    for i in range(max(n_layers - n_shared, 0), n_layers):  # they read the K/V of earlier layers
        file.read_names |= {f"blk.{i}.attn_{part}.weight" for part in ("k", "v", "k_norm")}
    # Frequencies of the half that is not turned are divided by a huge number.
    divisors = file.tensor("rope_freqs.weight", (settings["head_dim"] // 2,))
    n_turned = int((divisors == 1.0).sum())
    if not bool((divisors[n_turned:] > 1e9).all()):
        raise GGUFError(f"{file.name}: rope_freqs.weight does not fit the model")
    kv_heads = file.metadata.get("gemma4.attention.head_count_kv")
    by_layer = kv_heads if isinstance(kv_heads, list) and len(kv_heads) == n_layers else None
    full, sliding = slides.index(False), slides.index(True)
    table = names.get("per_layer_token_embd.weight")
    settings |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _name_sliding(slides),
        "sliding_window": file.require_int("gemma4.attention.sliding_window"),
        "head_dim": file.require_int("gemma4.attention.key_length_swa", 2, 1 << 16),
        "global_head_dim": settings["head_dim"],
        "num_kv_shared_layers": n_shared,
        "hidden_size_per_layer_input": file.get("gemma4.embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": settings["vocab_size"] if table is None else table.shape[0],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in names,
        "final_logit_softcapping": file.get("gemma4.final_logit_softcapping", float, 0.0) or None,
        "use_double_wide_mlp": isinstance(file.metadata.get("gemma4.feed_forward_length"), list),
        "rope_parameters": {
            "full_attention": {
                **full_rope,
                "rope_type": "proportional",
                "partial_rotary_factor": n_turned / len(divisors),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.require_float("gemma4.rope.freq_base_swa", 1e4, 1.0, 1e15),
            },
        },
    }
    if by_layer is not None:
        settings["num_key_value_heads"] = by_layer[sliding]
        settings["num_global_key_value_heads"] = by_layer[full]
    if file.get("gemma4.expert_count", int, 0) > 0:
        _add_experts(file, settings, True)
        settings |= {
            "enable_moe_block": True,
            "top_k_experts": settings.pop("num_experts_per_tok"),
            "moe_intermediate_size": file.require_int("gemma4.expert_feed_forward_length"),
        }


def _list_sliding(file: GGUFFile, architecture: str, n_layers: int) -> list[bool]:
    """Return which layers see a window of the text alone. Raises: GGUFError."""
    key = f"{architecture}.attention.sliding_window_pattern"
    slides = file.metadata.get(key)
    if not isinstance(slides, list) or len(slides) != n_layers or len({*map(bool, slides)}) < 2:
        raise GGUFError(
            f"{file.name}: {key} has to say of each of {n_layers} layers whether it sees a window "
            "of the text alone, and some do and some do not; download the file again"
        )
    return [bool(slide) for slide in slides]


def _name_sliding(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _add_experts(file: GGUFFile, settings: Settings, normalizes: bool) -> None:
    """Add how many experts there are, and how a router weighs them, as llama.cpp does it."""
    architecture = _name_of(file)
    n_experts = file.require_int(f"{architecture}.expert_count", 1, MAX_EXPERTS)
    settings |= {
        "num_experts": n_experts,
        "num_experts_per_tok": file.require_int(f"{architecture}.expert_used_count", 1, n_experts),
        "norm_topk_prob": normalizes,
    }


def _add_mixtral(file: GGUFFile, settings: Settings) -> None:
    _add_experts(file, settings, True)
    settings["num_local_experts"] = settings.pop("num_experts")
    del settings["norm_topk_prob"]


def _add_qwen3_moe(file: GGUFFile, settings: Settings) -> None:
    _add_experts(file, settings, True)
    settings["moe_intermediate_size"] = file.require_int(
        f"{_name_of(file)}.expert_feed_forward_length"
    )
    _add_attention_bias(file, settings)


def _add_qwen2_moe(file: GGUFFile, settings: Settings) -> None:
    _add_experts(file, settings, False)
    _add_widths(file, settings)
    settings["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors


def _add_widths(file: GGUFFile, settings: Settings) -> None:
    """Add the widths of experts and of the shared one."""
    width, per_token = settings["intermediate_size"], settings["num_experts_per_tok"]
    for setting, name, default in (  # the defaults are llama.cpp's
        ("moe_intermediate_size", "expert_feed_forward_length", width // per_token),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length", width),
    ):
        key = f"{_name_of(file)}.{name}"
        settings[setting] = file.require_int(key) if key in file.metadata else default


def _add_olmoe(file: GGUFFile, settings: Settings) -> None:
    _add_experts(file, settings, False)


def _add_nothing(file: GGUFFile, settings: Settings) -> None:
    """The common settings are all."""


# The name of an architecture in files -> its row.
ARCHITECTURES: dict[str, Architecture] = {
    # Mistral's files too. transformers rotates halves of queries and keys.
    "llama": Architecture("llama", _add_attention_bias, BY_HALVES),
    "qwen2": Architecture("qwen2", _add_nothing),
    "qwen3": Architecture("qwen3", _add_attention_bias),
    # With an image the angles would have three parts; of a text they are the same.
    "qwen2vl": Architecture("qwen2", _add_nothing),
    "qwen3vl": Architecture("qwen3", _add_attention_bias),
    "phi3": Architecture("phi3", _add_phi3, partly_rotated=True),
    "gemma": Architecture("gemma", _add_gemma, norms_plus_one=True),
    "gemma2": Architecture("gemma2", _add_gemma2, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", _add_gemma3, norms_plus_one=True),
    "gemma4": Architecture("gemma4_text", _add_gemma4, GEMMA4, layers_differ=True),
    "olmo2": Architecture("olmo2", _add_nothing),
    "mistral3": Architecture("ministral3", _add_mistral3, BY_HALVES),
    "arcee": Architecture("arcee", _add_attention_bias, BY_HALVES),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _add_attention_bias),
    "granite": Architecture("granite", _add_granite, BY_HALVES),
    "granitemoe": Architecture("granitemoe", _add_granite_moe, GRANITE_MOE),
    "granitehybrid": Architecture("granitemoehybrid", _add_granite_hybrid, GRANITE_HYBRID),
    # Queries and keys are not turned, whatever the file says. The key of its epsilon is that of
    # layer norms, and the norms are RMS norms.
    **{
        name: Architecture(
            "nemotron_h", _add_nemotron_h, NEMOTRON_H, has_layer_norms=True, partly_rotated=True
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "glm4": Architecture("glm4", _add_glm4, partly_rotated=True),
    "smollm3": Architecture("smollm3", _add_attention_bias, BY_HALVES),
    "ernie4_5": Architecture("ernie4_5", _add_ernie),
    "exaone4": Architecture("exaone4", _add_exaone4),
    "seed_oss": Architecture("seed_oss", _add_seed_oss),
    "command-r": Architecture("cohere", _add_cohere, has_layer_norms=True),
    "cohere2": Architecture("cohere2", _add_cohere2, has_layer_norms=True),
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
    "olmoe": Architecture("olmoe", _add_olmoe),
    "qwen2moe": Architecture("qwen2_moe", _add_qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _add_qwen3_moe),
    "qwen3vlmoe": Architecture("qwen3_moe", _add_qwen3_moe),
    "glm4moe": Architecture("glm4_moe", _add_glm4_moe, GLM4_MOE, partly_rotated=True),
    "gpt-oss": Architecture("gpt_oss", _add_gpt_oss, GPT_OSS),
}
# The name of an architecture -> a key, and the row of files in which it is above 0.
VARIANTS: dict[str, tuple[str, Architecture]] = {
    "llama": ("expert_count", Architecture("mixtral", _add_mixtral, BY_HALVES)),
    "olmo2": ("attention.sliding_window", Architecture("olmo3", _add_olmo3)),
}
