"""8-bit and 4-bit weights, by libraries that transformers supports or by the engine native.

A profile names the quantization of its model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from skipsearch.core.registry import unknown_name
from skipsearch.errors import ModelError
from skipsearch.models.activations import (
    ACTIVATIONS,
    DEFAULT_ACTIVATIONS,
    DEFAULT_KV_CACHE_DTYPE,
    KV_CACHE_DTYPES,
)
from skipsearch.models.loading.weight_files import StoredTensor

# name -> (library, bytes of a quantised weight with its share of the scales)
QUANTIZATIONS: dict[str, tuple[str, float]] = {
    "bitsandbytes-8bit": ("bitsandbytes", 1.0),
    "bitsandbytes-4bit": ("bitsandbytes", 0.57),
    "torchao-8bit": ("torchao", 1.0),
    "torchao-4bit": ("torchao", 0.57),
}
# By the engine native, after the plain weights are loaded: name -> bits of a weight.
NATIVE_QUANTIZATIONS = {f"native-{bits}bit": bits for bits in (8, 6, 5, 4)}
QUANTIZATION_NAMES = (*QUANTIZATIONS, *NATIVE_QUANTIZATIONS)
GGUF = "gguf"  # whatever a GGUF file holds
GGUF_PREFIX = f"{GGUF}-"  # of the quantization of a GGUF file, such as gguf-q4_1
# The end of a name if the inputs of matrices are rounded otherwise than by default, and the end
# after it if K/V are.
ENDINGS = {
    name: "" if name == DEFAULT_ACTIVATIONS else f"-{name}-activations" for name in ACTIVATIONS
}
KV_ENDINGS = {
    name: "" if name == DEFAULT_KV_CACHE_DTYPE else f"-{name}-kv" for name in KV_CACHE_DTYPES
}


def split_kv_cache_dtype(
    name: str | None, kv_cache_dtype: str | None = None
) -> tuple[str | None, str]:
    """Return a quantization without the ending of K/V, and their format.

    name: as a profile or a user has it. kv_cache_dtype: one of KV_CACHE_DTYPES; None: by the name.
    Raises: ModelError if the two contradict each other, or for another format.
    """
    return _split_ending(
        name, kv_cache_dtype, KV_ENDINGS, DEFAULT_KV_CACHE_DTYPE, "format of K/V", "kv-cache-dtype"
    )


def split_activations(name: str | None, activations: str | None) -> tuple[str | None, str]:
    """Return a quantization without its endings, and the activations.

    name: as a profile or a user has it. activations: one of ACTIVATIONS; None: by the name.
    Raises: ModelError if the two contradict each other, or for other activations.
    """
    return _split_ending(
        split_kv_cache_dtype(name)[0],
        activations,
        ENDINGS,
        DEFAULT_ACTIVATIONS,
        "kind of activations",
        "activations",
    )


def _split_ending(
    name: str | None,
    value: str | None,
    endings: dict[str, str],
    default: str,
    kind: str,
    option: str,
) -> tuple[str | None, str]:
    """Return (name without its ending, what the ending or `value` says)."""
    if value not in (None, *endings):
        raise ModelError(unknown_name(kind, str(value), tuple(endings)))
    base, named = name, None
    for known, ending in endings.items():
        if name is not None and ending and name.endswith(ending):
            base, named = name.removesuffix(ending), known
    if named and value not in (None, named):
        raise ModelError(
            f"quantization {name} says {option} {named}, and not {value}: use "
            f"--quantization {base} --{option} {value}"
        )
    return base, value or named or default


def join_rounding(
    quantization: str | None, activations: str | None, kv_cache_dtype: str | None
) -> str | None:
    """Return one name for what a user chose of the three.

    Raises: ModelError, as `split_activations` and `split_kv_cache_dtype`.
    """
    base, kv_cache_dtype = split_kv_cache_dtype(quantization, kv_cache_dtype)
    if activations is None and kv_cache_dtype == DEFAULT_KV_CACHE_DTYPE:
        return quantization
    base, activations = split_activations(base, activations)
    return name_with_activations(base or GGUF, activations) + KV_ENDINGS[kv_cache_dtype]


def loadable_quantization(quantization: str | None) -> str | None:
    """Return the quantization if a model can be loaded with it, else None.

    For example, gptq-4bit is None, because only stored weights have it.
    """
    base, _ = split_activations(quantization, None)
    is_loadable = base in QUANTIZATION_NAMES or (base or "").startswith(GGUF)
    return quantization if is_loadable else None


def name_with_activations(name: str, activations: str) -> str:
    """Return the name of a quantization with its activations, as profiles have it."""
    return name + ENDINGS[activations]


def native_bits(quantization: str | None) -> int | None:
    """Return the bits of weights that the engine native rounded; None for other weights."""
    base, _ = split_activations(quantization, None)
    return None if base is None else NATIVE_QUANTIZATIONS.get(base)


def is_native_quantization(quantization: str | None) -> bool:
    """Return whether weights are in blocks that the engine native reads."""
    return native_bits(quantization) is not None or (quantization or "").startswith(GGUF_PREFIX)


def rounds_activations(quantization: str | None) -> bool:
    """Return whether inputs of matrices are rounded."""
    return (
        is_native_quantization(quantization) and split_activations(quantization, None)[1] != "float"
    )


def make_quantization_config(name: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' `quantization_config` for a quantization; None for None.

    Raises: ModelError for an unknown name, a missing library, or a device or dtype for which the
    library has no kernel."""
    if name is None:
        return None
    if name not in QUANTIZATION_NAMES:
        raise ModelError(
            f"{unknown_name('quantization', name, QUANTIZATION_NAMES)}; or none at all"
        )
    if name in NATIVE_QUANTIZATIONS:
        raise ModelError(
            f"quantization {name} is made by the engine native and not by this loader: use "
            "skipsearch.load_model"
        )
    library, _ = QUANTIZATIONS[name]
    if find_spec(library) is None:
        raise ModelError(
            f"quantization {name} needs the library {library}, which is not installed: `pip "
            f"install {library}`, or load the model without quantization"
        )
    if name == "torchao-4bit" and (device.type != "cuda" or dtype != torch.bfloat16):
        raise ModelError(
            f"quantization torchao-4bit runs on a GPU in bfloat16 only, and not on {device} in "
            f"{str(dtype).removeprefix('torch.')}: use bitsandbytes-4bit, or no quantization"
        )
    return _make_config(name, dtype)


def read_stored_quantization(config: Any) -> str | None:
    """Return the name of the quantization of stored weights, such as gptq-4bit; None for plain
    weights.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    data: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(data.get("quant_method"), "value", data.get("quant_method") or "unknown"))
    bits = (
        8
        if data.get("load_in_8bit")
        else 4
        if data.get("load_in_4bit")
        else data.get("bits") or data.get("w_bit")
    )
    return f"{method}-{bits}bit" if bits else method


def bytes_per_value(tensor: StoredTensor, dtype: torch.dtype, quantization: str | None) -> float:
    """Return the bytes per value of a float tensor after loading. Only matrices are quantised, but
    not embeddings and head.
    """
    plain = any(part in tensor.name for part in ("embed", "lm_head", "wte"))
    if quantization in QUANTIZATIONS and len(tensor.shape) == 2 and not plain:
        return QUANTIZATIONS[quantization][1]
    if quantization in NATIVE_QUANTIZATIONS and len(tensor.shape) == 2:
        return NATIVE_QUANTIZATIONS[quantization] / 8 + 2 / 32  # a float16 scale for each block
    return dtype.itemsize


def _make_config(name: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if name == "bitsandbytes-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if name == "bitsandbytes-4bit":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig  # type: ignore[import-not-found]

    if name == "torchao-8bit":
        return TorchAoConfig(Int8WeightOnlyConfig())
    # The other packing formats need another library.
    return TorchAoConfig(Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))
