"""The metadata of a GGUF file as a config of transformers, for architectures that can be fused.

The keys are those of llama.cpp: gguf-py/gguf/constants.py and each model's conversion.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from skipsearch.errors import TokenizerWarning
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile
from skipsearch.models.loading.gguf_tokenizer import find_special_token
from skipsearch.models.third_party import first_line_of

MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 16
EXAONE4_PERIOD = 4  # the last of as many layers sees all of the text
GEMMA3_27B_LAYERS = 62  # the only Gemma 3 whose attention is scaled by the width of all heads

ROPE_TYPES = ("none", "linear", "yarn")
PARTLY_ROTATED = ("phi3", "glm4")  # architectures that may rotate a part of each row
# What else would change a model, and the value with which it does not.
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}

Settings = dict[str, Any]


def read_config(file: GGUFFile) -> Any:
    """Return the config of the model in a file.

    Raises: GGUFError for an architecture or a setting that is not supported.
    """
    from transformers import CONFIG_MAPPING

    architecture, model_type, add_settings = _read_architecture(file)
    settings = _read_common(file, architecture)
    add_settings(file, settings)
    try:
        config = CONFIG_MAPPING[model_type](**settings)
    except Exception as error:  # transformers validates configs in many ways
        raise GGUFError(
            f"{file.name}: its metadata make no {model_type} model ({first_line_of(error)})"
        ) from None
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # some families replace None
        setattr(config, name, settings[name])
    config.name_or_path = file.name
    return config


def read_shape(file: GGUFFile) -> tuple[str, int]:
    """Return (`model_type` of transformers, number of layers) of a model. Raises: GGUFError."""
    architecture, model_type, _ = _read_architecture(file)
    return model_type, _read_number(file, f"{architecture}.block_count", 1, MAX_LAYERS)


def _read_architecture(file: GGUFFile) -> tuple[str, str, Callable[[GGUFFile, Settings], None]]:
    """Return (architecture, `model_type` of transformers, what adds its settings).

    Raises: GGUFError.
    """
    architecture = file.get("general.architecture", str, "")
    if architecture not in ARCHITECTURES:
        raise GGUFError(
            f"{file.name} holds a model of the architecture {architecture[:40]!r}; GGUF files are "
            f"read for {', '.join(ARCHITECTURES)}: take the model's folder instead"
        )
    has_experts = architecture == "llama" and file.get("llama.expert_count", int, 0) > 0
    return architecture, *(MIXTRAL if has_experts else ARCHITECTURES[architecture])


def _read_common(file: GGUFFile, architecture: str) -> Settings:
    def number(key: str, low: int = 1, high: int = 1 << 24) -> int:
        return _read_number(file, f"{architecture}.{key}", low, high)

    hidden_size, heads = number("embedding_length"), number("attention.head_count", high=1 << 16)
    has_head_dim = f"{architecture}.attention.key_length" in file.metadata
    head_dim = number("attention.key_length") if has_head_dim else hidden_size // heads
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GGUFError(f"{file.name} has no tensor token_embd.weight; download the file again")
    for key, neutral in {**NEUTRAL, "attention.value_length": head_dim}.items():
        if (value := file.metadata.get(f"{architecture}.{key}", neutral)) != neutral:
            raise GGUFError(
                f"{file.name}: {architecture}.{key} is {str(value)[:40]}, and files are read only "
                f"if it is {neutral}: take the model's folder instead"
            )
    has_kv = f"{architecture}.attention.head_count_kv" in file.metadata
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token") is True
    return {
        "vocab_size": table.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count", high=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv") if has_kv else heads,
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length", high=1 << 31),
        "rms_norm_eps": file.require_float(
            f"{architecture}.attention.layer_norm_rms_epsilon", None, 1e-30, 1.0
        ),
        "rope_parameters": _read_rope(file, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": read_token(file, "bos", table.shape[0], adds_bos),
        "eos_token_id": read_token(file, "eos", table.shape[0], needed=True),
        "pad_token_id": read_token(file, "padding", table.shape[0]),
    }


def _read_number(file: GGUFFile, key: str, low: int, high: int) -> int:
    """Return a whole number, which may be given once for each layer. Raises: GGUFError."""
    values = file.metadata.get(key)
    if not isinstance(values, list) or not values:
        return file.require_int(key, low, high)
    if len(set(values)) > 1:
        raise GGUFError(
            f"{file.name}: {key} differs from layer to layer, and files are read only if it does "
            "not: take the model's folder instead"
        )
    return GGUFFile(file.paths, {key: values[0]}).require_int(key, low, high)


def read_token(file: GGUFFile, name: str, vocab_size: int, needed: bool = False) -> int | None:
    """Return the id of a special token such as `bos`; None, with a warning, for an invalid one.

    Raises: GGUFError for an invalid id of a token that is needed.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    if needed:
        return file.require_int(key, 0, vocab_size - 1)
    token = find_special_token(file, name, vocab_size)
    if token is None:
        warnings.warn(
            f"{file.name}: {key} is {file.metadata[key]}, and its vocabulary has {vocab_size} "
            "tokens; the model is read without this token",
            TokenizerWarning,
            stacklevel=2,
        )
    return token


def _read_rope(file: GGUFFile, architecture: str, head_dim: int) -> Settings:
    theta = file.require_float(f"{architecture}.rope.freq_base", 10000.0, 1.0, 1e15)
    scaling = f"{architecture}.rope.scaling"
    factor_key = f"{scaling}.factor"
    if factor_key not in file.metadata and f"{architecture}.rope.scale_linear" in file.metadata:
        factor_key = f"{architecture}.rope.scale_linear"  # of old files
    factor = file.get(factor_key, float, 1.0) and file.require_float(factor_key, 1.0, 1.0, 1e6)
    # As in llama.cpp, a factor without a type is one of linear scaling, and 0 is none.
    kind = file.get(f"{scaling}.type", str, "linear" if factor_key in file.metadata else "none")
    if any(name.startswith("rope_factors") for name in file.tensors):
        kind = "longrope"
    rope: Settings = {"rope_type": "default", "rope_theta": theta}
    if kind not in ROPE_TYPES:
        raise GGUFError(
            f"{file.name}: its rotary angles are scaled by {kind[:40]!r}, and GGUF files are read "
            f"with {', '.join(ROPE_TYPES)}: take the model's folder instead"
        )
    if kind != "none" and factor:
        rope |= {"rope_type": kind, "factor": factor}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = file.require_int(
            f"{scaling}.original_context_length"
        )
    n_rotary = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    least = 2 if architecture in PARTLY_ROTATED else head_dim
    if not least <= n_rotary <= head_dim or n_rotary % 2:
        raise GGUFError(
            f"{file.name}: {architecture}.rope.dimension_count is {n_rotary}; it has to be even, "
            f"from {least} to {head_dim}: take the model's folder instead"
        )
    if n_rotary != head_dim:
        rope["partial_rotary_factor"] = n_rotary / head_dim
    return rope


def _add_granite(file: GGUFFile, settings: Settings) -> None:
    _add_attention_bias(file, settings)
    for setting, key, neutral in (
        ("attention_multiplier", "attention.scale", settings["head_dim"] ** -0.5),
        ("embedding_multiplier", "embedding_scale", 1.0),
        ("residual_multiplier", "residual_scale", 1.0),
        ("logits_scaling", "logit_scale", 1.0),
    ):
        settings[setting] = file.require_float(f"granite.{key}", neutral, 1e-9, 1e9)


def _add_glm4(file: GGUFFile, settings: Settings) -> None:
    _add_attention_bias(file, settings)
    share = settings["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    settings["partial_rotary_factor"] = share


def _add_seed_oss(file: GGUFFile, settings: Settings) -> None:
    _add_attention_bias(file, settings)
    settings["attention_out_bias"] = "blk.0.attn_output.bias" in file.tensors


def _add_ernie(file: GGUFFile, settings: Settings) -> None:
    settings["use_bias"] = "blk.0.attn_q.bias" in file.tensors


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
    settings["layer_types"] = [
        "sliding_attention" if slide else "full_attention" for slide in slides
    ]


def _add_attention_bias(file: GGUFFile, settings: Settings) -> None:
    settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _add_phi3(file: GGUFFile, settings: Settings) -> None:
    settings["sliding_window"] = file.get("phi3.attention.sliding_window", int, 0) or None
    settings["pad_token_id"] = settings["pad_token_id"] or 0
    rotary_share = settings["rope_parameters"].get("partial_rotary_factor")
    if rotary_share:
        settings["partial_rotary_factor"] = rotary_share


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
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _add_experts(file: GGUFFile, settings: Settings, normalizes: bool) -> None:
    """Add how many experts there are, and how a router weighs them, as llama.cpp does it."""
    architecture = file.get("general.architecture", str, "")
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
    settings["moe_intermediate_size"] = file.require_int("qwen3moe.expert_feed_forward_length")
    _add_attention_bias(file, settings)


def _add_qwen2_moe(file: GGUFFile, settings: Settings) -> None:
    _add_experts(file, settings, False)
    width, per_token = settings["intermediate_size"], settings["num_experts_per_tok"]
    for setting, key, default in (  # the defaults are llama.cpp's
        ("moe_intermediate_size", "expert_feed_forward_length", width // per_token),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length", width),
    ):
        has_key = f"qwen2moe.{key}" in file.metadata
        settings[setting] = file.require_int(f"qwen2moe.{key}") if has_key else default
    settings["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors


def _add_olmoe(file: GGUFFile, settings: Settings) -> None:
    _add_experts(file, settings, False)


def _add_nothing(file: GGUFFile, settings: Settings) -> None:
    """The common settings are all."""


# Architecture of the file -> model_type of transformers, and what adds its own settings.
ARCHITECTURES: dict[str, tuple[str, Callable[[GGUFFile, Settings], None]]] = {
    "llama": ("llama", _add_attention_bias),  # Mistral's files too
    "qwen2": ("qwen2", _add_nothing),
    "qwen3": ("qwen3", _add_attention_bias),
    "phi3": ("phi3", _add_phi3),
    "gemma": ("gemma", _add_gemma),
    "gemma3": ("gemma3_text", _add_gemma3),
    "olmo2": ("olmo2", _add_nothing),
    "granite": ("granite", _add_granite),
    "glm4": ("glm4", _add_glm4),
    "smollm3": ("smollm3", _add_attention_bias),
    "ernie4_5": ("ernie4_5", _add_ernie),
    "exaone4": ("exaone4", _add_exaone4),
    "seed_oss": ("seed_oss", _add_seed_oss),
    "olmoe": ("olmoe", _add_olmoe),
    "qwen2moe": ("qwen2_moe", _add_qwen2_moe),
    "qwen3moe": ("qwen3_moe", _add_qwen3_moe),
}
MIXTRAL = ("mixtral", _add_mixtral)  # files of the architecture llama that have experts
# Architectures whose files have the rows of queries and keys in the order in which neighbours
# rotate together. transformers rotates halves.
ROTATES_NEIGHBOURS = frozenset({"llama", "granite", "smollm3"})
# Families whose norms multiply by 1 + weight; files hold the sum.
NORMS_PLUS_ONE = frozenset({"gemma", "gemma3_text"})


def rotary_factors(file: GGUFFile) -> Tensor | None:
    """Return the divisors of rotary frequencies that Llama 3.1 and later have; None for none."""
    if "rope_freqs.weight" not in file.tensors:
        return None
    (length,) = file.tensors["rope_freqs.weight"].shape
    return file.vector("rope_freqs.weight", length)
