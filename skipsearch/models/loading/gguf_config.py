"""The metadata of a GGUF file as a config of transformers.

The keys are those of llama.cpp: gguf-py/gguf/constants.py and each model's conversion.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import Tensor

from skipsearch.errors import TokenizerWarning
from skipsearch.models.loading.gguf_architectures import (
    ARCHITECTURES,
    VARIANTS,
    Architecture,
    Settings,
)
from skipsearch.models.loading.gguf_architectures.shared import cut_to_layers
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile
from skipsearch.models.loading.gguf_tokenizer import find_special_token
from skipsearch.models.third_party import first_line_of

MAX_LAYERS = 1024

EPSILONS = {"rms_norm": "layer_norm_rms_epsilon", "layer_norm": "layer_norm_epsilon"}
ROPE_TYPES = ("none", "linear", "yarn", "longrope")
# What else would change a model, and the value with which it does not.
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}


def read_config(file: GGUFFile) -> Any:
    """Return the config of the model in a file.

    Raises: GGUFError for an architecture or a setting that is not supported.
    """
    from transformers import CONFIG_MAPPING

    architecture = read_architecture(file)
    settings = _read_common(file, architecture)
    architecture.add_settings(file, settings)
    try:
        config = CONFIG_MAPPING[architecture.model_type](**settings)
    except Exception as error:  # transformers validates configs in many ways
        raise GGUFError(
            f"{file.name}: its metadata make no {architecture.model_type} model "
            f"({first_line_of(error)})"
        ) from None
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # some families replace None
        setattr(config, name, settings[name])
    config.name_or_path = file.name
    _require_same_windows(file, config)
    return config


def _require_same_windows(file: GGUFFile, config: Any) -> None:
    """Raise GGUFError if other layers of a file see a window of the text than those of a config."""
    key = f"{file.metadata['general.architecture']}.attention.sliding_window_pattern"
    pattern, kinds = file.metadata.get(key), getattr(config, "layer_types", None)
    if pattern is None or kinds is None:
        return
    slides = [kind == "sliding_attention" for kind in kinds]
    pattern = cut_to_layers(file, pattern, len(kinds))
    if isinstance(pattern, int):  # the last of as many layers sees all of the text
        pattern = [bool(pattern) and (i + 1) % pattern != 0 for i in range(len(kinds))]
    if not isinstance(pattern, list) or [bool(slide) for slide in pattern] != slides:
        raise GGUFError(
            f"{file.name}: {key} is {str(file.metadata[key])[:40]}, and the layers of "
            f"{config.model_type} models see other parts of the text: take the model's folder "
            "instead"
        )


def read_shape(file: GGUFFile) -> tuple[str, int]:
    """Return (`model_type` of transformers, number of layers) of a model. Raises: GGUFError."""
    return read_architecture(file).model_type, _count_layers(file)


def read_architecture(file: GGUFFile) -> Architecture:
    """Return the row of a file's architecture. Raises: GGUFError."""
    name = file.get("general.architecture", str, "")
    if name not in ARCHITECTURES:
        raise GGUFError(
            f"{file.name} holds a model of the architecture {name[:40]!r}, and docs/models.md has "
            "those that are read: take the model's folder instead"
        )
    if name in VARIANTS:
        key, least, variant = VARIANTS[name]
        value = file.metadata.get(f"{name}.{key}")
        if (value if isinstance(value, bool) else file.get(f"{name}.{key}", int, 0)) >= least:
            return variant
    return ARCHITECTURES[name]


def _count_layers(file: GGUFFile) -> int:
    """Return the number of layers, without the draft heads after the last. Raises: GGUFError."""
    name = file.metadata["general.architecture"]
    n_blocks = _read_number(file, f"{name}.block_count", 1, MAX_LAYERS)
    n_heads = file.get(f"{name}.nextn_predict_layers", int, 0)
    if not 0 <= n_heads < n_blocks:
        raise GGUFError(
            f"{file.name}: {name}.nextn_predict_layers is {n_heads}; it has to be 0 to "
            f"{n_blocks - 1}"
        )
    return n_blocks - n_heads


def _read_common(file: GGUFFile, row: Architecture) -> Settings:
    architecture = file.metadata["general.architecture"]

    def number(key: str, low: int = 1, high: int = 1 << 24) -> int:
        return _read_number(file, f"{architecture}.{key}", low, high, row.layers_differ)

    hidden_size = number("embedding_length")
    heads = number("attention.head_count", high=1 << 16) if row.attends else 1
    has_head_dim = f"{architecture}.attention.key_length" in file.metadata
    head_dim = number("attention.key_length") if has_head_dim else hidden_size // heads
    if row.has_latents:
        head_dim = number("rope.dimension_count", high=1 << 16)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GGUFError(f"{file.name} has no tensor token_embd.weight; download the file again")
    theta = file.metadata.get(f"{architecture}.rope.freq_base", 10000.0)
    others = {} if row.has_latents or row.values_differ else {"attention.value_length": head_dim}
    if not row.windows_turn:
        others["rope.freq_base_swa"] = theta
    rope = _read_rope(file, architecture, head_dim, row.partly_rotated)
    neutrals = {**NEUTRAL, **others}
    if rope["rope_type"] == "longrope":
        del neutrals["rope.scaling.attn_factor"]  # has been read
    for key, neutral in neutrals.items():
        if (value := file.metadata.get(f"{architecture}.{key}", neutral)) != neutral:
            raise GGUFError(
                f"{file.name}: {architecture}.{key} is {str(value)[:40]}, and files are read only "
                f"if it is {neutral}: take the model's folder instead"
            )
    has_kv = f"{architecture}.attention.head_count_kv" in file.metadata
    has_width = f"{architecture}.feed_forward_length" in file.metadata
    kind = "layer_norm" if row.has_layer_norms else "rms_norm"
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token") is True
    return {
        "vocab_size": table.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": number(
            "feed_forward_length" if has_width else "expert_feed_forward_length"
        )
        if row.attends
        else hidden_size,
        "num_hidden_layers": _count_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv") if has_kv else heads,
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length", high=1 << 31),
        f"{kind}_eps": file.require_float(
            f"{architecture}.attention.{EPSILONS[kind]}", None, 1e-30, 1.0
        ),
        "rope_parameters": rope,
        **{key: rope[key] for key in ("partial_rotary_factor",) if key in rope},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": read_token(file, "bos", table.shape[0], adds_bos),
        "eos_token_id": read_token(file, "eos", table.shape[0], needed=True),
        "pad_token_id": read_token(file, "padding", table.shape[0]),
    }


def _read_number(file: GGUFFile, key: str, low: int, high: int, may_differ: bool = False) -> int:
    """Return a whole number, which may be given once for each layer. Raises: GGUFError.

    Layers that lack what it counts have a 0, as recurrent ones have no heads. may_differ: the
    least of the numbers is returned if they are not the same.
    """
    values = file.metadata.get(key)
    if not isinstance(values, list) or not values:
        return file.require_int(key, low, high)
    values = [value for value in values if value != 0] or [0]
    if len(set(values)) > 1 and not may_differ:
        raise GGUFError(
            f"{file.name}: {key} differs from layer to layer, and files are read only if it does "
            "not: take the model's folder instead"
        )
    least = min(value if isinstance(value, int) else 0 for value in values)
    return GGUFFile(file.paths, {key: least}).require_int(key, low, high)


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


def _read_rope(file: GGUFFile, architecture: str, head_dim: int, partly_rotated: bool) -> Settings:
    theta = file.require_float(f"{architecture}.rope.freq_base", 10000.0, 1.0, 1e15)
    scaling = f"{architecture}.rope.scaling"
    factor_key = f"{scaling}.factor"
    if factor_key not in file.metadata and f"{architecture}.rope.scale_linear" in file.metadata:
        factor_key = f"{architecture}.rope.scale_linear"  # of old files
    factor = file.get(factor_key, float, 1.0) and file.require_float(factor_key, 1.0, 1.0, 1e6)
    # As in llama.cpp, a factor without a type is one of linear scaling, and 0 is none.
    kind = file.get(f"{scaling}.type", str, "linear" if factor_key in file.metadata else "none")
    if any(name.startswith("rope_factors") for name in file.tensors):
        kind = "longrope"  # which files of Phi do not name
    rope: Settings = {"rope_type": "default", "rope_theta": theta}
    if kind not in ROPE_TYPES:
        raise GGUFError(
            f"{file.name}: its rotary angles are scaled by {kind[:40]!r}, and GGUF files are read "
            f"with {', '.join(ROPE_TYPES)}: take the model's folder instead"
        )
    if kind in ("linear", "yarn") and factor:
        rope |= {"rope_type": kind, "factor": factor}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = file.require_int(
            f"{scaling}.original_context_length"
        )
    n_rotary = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    least = 2 if partly_rotated else head_dim
    if not least <= n_rotary <= head_dim or n_rotary % 2:
        raise GGUFError(
            f"{file.name}: {architecture}.rope.dimension_count is {n_rotary}; it has to be even, "
            f"from {least} to {head_dim}: take the model's folder instead"
        )
    if kind == "longrope":
        rope |= _read_longrope(file, architecture, n_rotary)
    if partly_rotated:
        rope["partial_rotary_factor"] = find_rotary_factor(n_rotary, head_dim)
    return rope


def _read_longrope(file: GGUFFile, architecture: str, n_rotary: int) -> Settings:
    """Return what `longrope` adds. Its divisors of frequencies are tensors of the file."""
    scaling = f"{architecture}.rope.scaling"
    original = f"{scaling}.original_context_length"
    if original not in file.metadata:  # as in llama.cpp
        original = f"{architecture}.context_length"
    rope: Settings = {
        "rope_type": "longrope",
        "original_max_position_embeddings": file.require_int(original),
        "attention_factor": file.require_float(f"{scaling}.attn_factor", 1.0, 1e-3, 1e3),
    }
    for length in ("short", "long"):
        divisors = file.tensor(f"rope_factors_{length}.weight", (n_rotary // 2,))
        if not bool((divisors > 0).all()):
            raise GGUFError(f"{file.name}: rope_factors_{length}.weight does not fit the model")
        rope[f"{length}_factor"] = divisors.tolist()
    return rope


def find_rotary_factor(n_rotary: int, head_dim: int) -> float:
    """Return the factor by which transformers counts the rotated numbers of a head."""
    factor = n_rotary / head_dim
    is_short = int(head_dim * factor) < n_rotary  # the product may be rounded down
    return math.nextafter(factor, 1.0) if is_short else factor


def rotary_factors(file: GGUFFile) -> Tensor | None:
    """Return the divisors of rotary frequencies that Llama 3.1 and later have; None for none."""
    if "rope_freqs.weight" not in file.tensors:
        return None
    (length,) = file.tensors["rope_freqs.weight"].shape
    return file.tensor("rope_freqs.weight", (length,))
