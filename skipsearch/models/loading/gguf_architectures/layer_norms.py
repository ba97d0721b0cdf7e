"""Architectures with layer norms, as the first models had, one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_architectures.row import Architecture, Part, Settings, Source
from skipsearch.models.loading.gguf_architectures.shared import (
    BY_HALVES,
    JOINED_QKV,
    add_attention_bias,
    add_nothing,
    group_by_key_head,
    read_clip,
    require_value,
)
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile

GPT_NEOX_20B_LAYERS = 44  # its activation is another one than Pythia's
STARCODER2_WINDOW = 4096
MAX_NORMS = 256  # of the heads of a layer; StableLM 2 has 32
OLMO_EPSILON = 1e-5  # a constant of the family


def _order_by_head(config: Any, length: int) -> Tensor:
    """Return the order of rows that files have as queries, keys, values, and models by head."""
    return torch.arange(length).view(3, config.num_attention_heads, -1).transpose(0, 1).flatten()


def _order_by_key_head(config: Any, length: int) -> Tensor:
    """Return the order of rows that files have as queries, keys, values, and models by key head."""
    heads, kv_heads = config.num_attention_heads, _count_key_heads(config)
    widths = [length * n // (heads + 2 * kv_heads) for n in (heads, kv_heads, kv_heads)]
    return group_by_key_head(length, widths, kv_heads)


def _count_key_heads(config: Any) -> int:
    return int(config.num_kv_heads) if config.new_decoder_architecture else 1


def _find_head(index: int, heads_key: str) -> Part:
    """Return where the norm of a head is among those of all."""

    def find(config: Any) -> tuple[int, int]:
        return index * config.head_dim, getattr(config, heads_key) * config.head_dim

    return find


STABLELM: Mapping[str, Sequence[Source]] = {
    f"self_attn.{name}_layernorm.norms.{index}.weight": [
        Source((f"attn_{name}_norm.weight",), part=_find_head(index, heads_key))
    ]
    for name, heads_key in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for index in range(MAX_NORMS)
}
GPT_NEOX: Mapping[str, Sequence[Source]] = {
    f"attention.query_key_value.{kind}": [Source((f"attn_qkv.{kind}",), rows=_order_by_head)]
    for kind in ("weight", "bias")
}
BLOOM: Mapping[str, Sequence[Source]] = {
    **{
        f"self_attention.query_key_value.{kind}": [Source((f"attn_qkv.{kind}",), _order_by_head)]
        for kind in ("weight", "bias")
    },
    **{
        f"post_attention_layernorm.{kind}": [Source((f"ffn_norm.{kind}",))]
        for kind in ("weight", "bias")
    },
    **{
        f"transformer.word_embeddings_layernorm.{kind}": [Source((f"token_embd_norm.{kind}",))]
        for kind in ("weight", "bias")
    },
}
FALCON: Mapping[str, Sequence[Source]] = {
    "self_attention.query_key_value.weight": [Source(("attn_qkv.weight",), rows=_order_by_key_head)]
}


def _add_nemotron(file: GGUFFile, settings: Settings) -> None:
    _add_jais2(file, settings)
    settings["norm_eps"] = settings.pop("layer_norm_eps")


def _add_jais2(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    settings["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors


def _add_stablelm(file: GGUFFile, settings: Settings) -> None:
    has_one_norm = "blk.0.ffn_norm.weight" not in file.tensors
    settings |= {
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": file.metadata.get("stablelm.use_parallel_residual", has_one_norm),
    }


def _add_starcoder2(file: GGUFFile, settings: Settings) -> None:
    # The published models see a window, and no file says so. Up to its length it is the same.
    window = file.get("starcoder2.attention.sliding_window", int, 0)
    window = window if window > 0 else STARCODER2_WINDOW
    settings |= {
        "norm_epsilon": settings.pop("layer_norm_eps"),
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
        "max_position_embeddings": min(settings["max_position_embeddings"], window),
    }


def _add_gpt_neox(file: GGUFFile, settings: Settings) -> None:
    is_20b = settings["num_hidden_layers"] == GPT_NEOX_20B_LAYERS
    settings |= {
        "hidden_act": "gelu_fast" if is_20b else "gelu",
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
        "use_parallel_residual": file.metadata.get("gptneox.use_parallel_residual", True) is True,
    }


def _add_olmo(file: GGUFFile, settings: Settings) -> None:
    add_attention_bias(file, settings)
    epsilon = settings.pop("layer_norm_eps")
    if abs(epsilon - OLMO_EPSILON) > 1e-3 * OLMO_EPSILON:
        raise GGUFError(
            f"{file.name}: olmo.attention.layer_norm_epsilon is {epsilon:g}, and files are read "
            f"only if it is {OLMO_EPSILON:g}: take the model's folder instead"
        )
    settings |= read_clip(file)


def _add_falcon(file: GGUFFile, settings: Settings) -> None:
    has_two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    kv_heads = settings["num_key_value_heads"]
    if settings["num_attention_heads"] % kv_heads:
        raise GGUFError(
            f"{file.name}: falcon.attention.head_count_kv is {kv_heads}, which does not divide "
            "its heads; download the file again"
        )
    del settings["head_dim"]
    settings |= {
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": has_two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "ffn_hidden_size": settings["intermediate_size"],
        "layer_norm_epsilon": settings.pop("layer_norm_eps"),
    }


def _add_gpt2(file: GGUFFile, settings: Settings) -> None:
    _keep_positions(settings)
    settings["n_inner"] = settings.pop("intermediate_size")


def _add_starcoder(file: GGUFFile, settings: Settings) -> None:
    settings["multi_query"] = settings["num_key_value_heads"] == 1
    _add_gpt2(file, settings)


def _add_bloom(file: GGUFFile, settings: Settings) -> None:
    _keep_positions(settings)


def _add_mpt(file: GGUFFile, settings: Settings) -> None:
    _keep_positions(settings)
    # transformers takes no other number, whatever the config says.
    require_value(file, "attention.max_alibi_bias", 8.0)
    settings |= {"max_seq_len": settings["max_position_embeddings"], "attn_config": read_clip(file)}


def _keep_positions(settings: Settings) -> None:
    """Remove what only models with rotary angles have."""
    for name in ("rope_parameters", "head_dim"):
        del settings[name]
    settings["layer_norm_epsilon"] = settings.pop("layer_norm_eps")


# The name of an architecture in files -> its row.
LAYER_NORMS: dict[str, Architecture] = {
    "nemotron": Architecture(
        "nemotron", _add_nemotron, norms_plus_one=True, has_layer_norms=True, partly_rotated=True
    ),
    "jais2": Architecture("jais2", _add_jais2, has_layer_norms=True),
    "stablelm": Architecture(
        "stablelm", _add_stablelm, STABLELM, has_layer_norms=True, partly_rotated=True
    ),
    "starcoder2": Architecture("starcoder2", _add_starcoder2, has_layer_norms=True),
    "phi2": Architecture("phi", add_nothing, JOINED_QKV, has_layer_norms=True, partly_rotated=True),
    "gptneox": Architecture(
        "gpt_neox", _add_gpt_neox, GPT_NEOX, has_layer_norms=True, partly_rotated=True
    ),
    "olmo": Architecture("olmo", _add_olmo, BY_HALVES, has_layer_norms=True),
    "gpt2": Architecture("gpt2", _add_gpt2, has_layer_norms=True),
    "starcoder": Architecture("gpt_bigcode", _add_starcoder, has_layer_norms=True),
    "bloom": Architecture("bloom", _add_bloom, BLOOM, has_layer_norms=True),
    "mpt": Architecture("mpt", _add_mpt, has_layer_norms=True),
    "falcon": Architecture("falcon", _add_falcon, FALCON, has_layer_norms=True),
}
