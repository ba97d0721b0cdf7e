"""8-bit and 4-bit weights, by the libraries that transformers knows for that or by the engine native. A quantization is part of a profile's
model key."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from skipsearch.errors import ModelError
from skipsearch.models.files import Stored
from skipsearch.names import unknown

# name -> (library, bytes a quantised weight takes, its scales included)
QUANTIZATIONS: dict[str, tuple[str, float]] = {
    "bitsandbytes-8bit": ("bitsandbytes", 1.0),
    "bitsandbytes-4bit": ("bitsandbytes", 0.57),
    "torchao-8bit": ("torchao", 1.0),
    "torchao-4bit": ("torchao", 0.57),
}
NATIVE = "native-8bit"   # by the engine native, once the plain weights are loaded
NAMES = (*QUANTIZATIONS, NATIVE)


def quantization_config(name: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """What transformers' `quantization_config` takes; None for None.

    Raises: ModelError for an unknown name, a missing library, or a device or dtype that the library has no kernel for.
    """
    if name is None:
        return None
    if name not in NAMES:
        raise ModelError(f"{unknown('quantization', name, NAMES)}; or none at all")
    if name == NATIVE:
        raise ModelError(f"quantization {NATIVE} is made by the engine native and not by this loader: use skipsearch.load_model")
    library, _ = QUANTIZATIONS[name]
    if find_spec(library) is None:
        raise ModelError(f"quantization {name} needs the library {library}, which is not installed: `pip install {library}`, "
                         "or load the model without quantization")
    if name == "torchao-4bit" and (device.type != "cuda" or dtype != torch.bfloat16):
        raise ModelError(f"quantization torchao-4bit runs on a GPU in bfloat16 only, and not on {device} in "
                         f"{str(dtype).removeprefix('torch.')}: use bitsandbytes-4bit, or no quantization")
    return _config(name, dtype)


def stored_quantization(config: Any) -> str | None:
    """The name of what a config says its weights are quantised with already, such as gptq-4bit; None for plain weights."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    data: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(data.get("quant_method"), "value", data.get("quant_method") or "unknown"))
    bits = 8 if data.get("load_in_8bit") else 4 if data.get("load_in_4bit") else data.get("bits") or data.get("w_bit")
    return f"{method}-{bits}bit" if bits else method


def bytes_per_value(tensor: Stored, dtype: torch.dtype, quantization: str | None) -> float:
    """Of a floating-point tensor once loaded. Only matrices are quantised, and neither embeddings nor the head."""
    plain = any(part in tensor.name for part in ("embed", "lm_head", "wte"))
    if quantization in QUANTIZATIONS and len(tensor.shape) == 2 and not plain:
        return QUANTIZATIONS[quantization][1]
    return dtype.itemsize


def _config(name: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if name == "bitsandbytes-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if name == "bitsandbytes-4bit":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig  # type: ignore[import-not-found]

    if name == "torchao-8bit":
        return TorchAoConfig(Int8WeightOnlyConfig())
    return TorchAoConfig(Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))  # its other packings need another library
