"""What rows of several architectures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.loading.gguf_architectures.row import Order, Settings, Source
from skipsearch.models.loading.gguf_file import GGUFError, GGUFFile

MAX_EXPERTS = 1 << 16


SIGMOID = 2  # of llama.cpp's functions that score experts


def order_by_halves(heads_key: str) -> Order:
    """Return the order of rows of which neighbours rotate together in files, and halves here."""

    def order(config: Any, length: int) -> Tensor:
        heads = getattr(config, heads_key)
        return torch.arange(length).view(heads, -1, 2).transpose(1, 2).flatten()

    return order


BY_HALVES: Mapping[str, Sequence[Source]] = {
    f"self_attn.{part}_proj.{kind}": [
        Source((f"attn_{part}.{kind}",), rows=order_by_halves(heads_key))
    ]
    for part, heads_key in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}


def log_of_negative(parts: Sequence[Tensor]) -> Tensor:
    return (-parts[0]).log()


def name_of(file: GGUFFile) -> str:
    return str(file.metadata["general.architecture"])


def list_numbers(file: GGUFFile, key: str, n_layers: int) -> list[Any]:
    """Return the numbers of a key, one for each layer of the model. Raises: GGUFError."""
    name = name_of(file)
    numbers = file.metadata.get(f"{name}.{key}")
    n_blocks = n_layers + file.get(f"{name}.nextn_predict_layers", int, 0)  # and draft heads
    if not isinstance(numbers, list) or len(numbers) != n_blocks:
        raise GGUFError(
            f"{file.name}: {name}.{key} has to be a list of {n_blocks} numbers, one for each "
            "layer; download the file again"
        )
    return numbers[:n_layers]


def list_attending(file: GGUFFile, settings: Settings) -> list[bool]:
    """Return which layers attend, by their numbers of heads for keys. Raises: GGUFError."""
    numbers = list_numbers(file, "attention.head_count_kv", settings["num_hidden_layers"])
    return [bool(number) for number in numbers]


def list_sliding(file: GGUFFile, architecture: str, n_layers: int) -> list[bool]:
    """Return which layers see a window of the text alone. Raises: GGUFError."""
    key = f"{architecture}.attention.sliding_window_pattern"
    slides = file.metadata.get(key)
    if not isinstance(slides, list) or len(slides) != n_layers or len({*map(bool, slides)}) < 2:
        raise GGUFError(
            f"{file.name}: {key} has to say of each of {n_layers} layers whether it sees a window "
            "of the text alone, and some do and some do not; download the file again"
        )
    return [bool(slide) for slide in slides]


def name_sliding(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def add_attention_bias(file: GGUFFile, settings: Settings) -> None:
    settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def add_experts(file: GGUFFile, settings: Settings, normalizes: bool) -> None:
    """Add how many experts there are, and how a router weighs them, as llama.cpp does it."""
    architecture = name_of(file)
    n_experts = file.require_int(f"{architecture}.expert_count", 1, MAX_EXPERTS)
    settings |= {
        "num_experts": n_experts,
        "num_experts_per_tok": file.require_int(f"{architecture}.expert_used_count", 1, n_experts),
        "norm_topk_prob": normalizes,
    }


def add_nothing(file: GGUFFile, settings: Settings) -> None:
    """The common settings are all."""
