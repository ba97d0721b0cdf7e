"""Models of a given shape with random weights, to measure speed where the real weights are not at hand. For speed only.

`synthetic:llama-2-13b`, or `synthetic:LAYERSxWIDTH` (`synthetic:24x512`), each with `/SIZE` behind it if wanted: SIZE is how large the
residual branches are together, beside the embedding. The smaller, the more often a draft without some of them names the full model's
token: with half of them left out about always at 1, and hardly ever at 8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from skipsearch.errors import ModelError
from skipsearch.models.files import Stored
from skipsearch.names import unknown

PREFIX = "synthetic:"
SIZE = 2.0


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int


SHAPES = {
    "llama-2-7b": Shape(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": Shape(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": Shape(80, 8192, 28672, 64, 8, 32000, 4096),
    "llama-3-8b": Shape(32, 4096, 14336, 32, 8, 128256, 8192),
    "phi-3-mini": Shape(32, 3072, 8192, 32, 32, 32064, 4096),
}


def is_synthetic(name: str) -> bool:
    return name.startswith(PREFIX)


def parse(name: str) -> tuple[Shape, float]:
    """(shape, size of the branches). Raises: ModelError."""
    shape, _, size = name.removeprefix(PREFIX).partition("/")
    match = re.fullmatch(r"(\d{1,3})x(\d{2,5})", shape)
    if shape not in SHAPES and match is None:
        raise ModelError(f"{unknown('synthetic model', shape, SHAPES)}; or LAYERSxWIDTH, such as {PREFIX}24x512")
    try:
        branches = float(size) if size else SIZE
    except ValueError:
        branches = -1.0
    if not 0 < branches <= 100:
        raise ModelError(f"{name}: the size of its branches is {size!r}; write a number above 0, such as {PREFIX}{shape}/{SIZE}")
    return SHAPES.get(shape) or _of_size(name, int(match[1]), int(match[2])), branches  # type: ignore[index]


def _of_size(name: str, layers: int, hidden: int) -> Shape:
    """As wide in proportion as Llama: an MLP of 2.75 widths, rounded to whole cache lines, and heads of 64."""
    if hidden % 64 or not layers:
        raise ModelError(f"{name}: its heads are 64 wide, so its width is a multiple of 64; write {PREFIX}{max(1, layers)}x"
                         f"{max(64, hidden // 64 * 64)}")
    return Shape(layers, hidden, round(hidden * 2.75 / 64) * 64, hidden // 64, hidden // 64, 4096, 8192)


def tensors(shape: Shape) -> list[Stored]:
    """The matrices that it will hold, for the question whether they fit."""
    wide, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    layer = 2 * wide * wide + 2 * wide * kv + 3 * wide * shape.intermediate
    return [Stored("model", (shape.layers * layer + 2 * wide * shape.vocab,), None)]


def config(shape: Shape) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
                       num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
                       max_position_embeddings=shape.context, bos_token_id=None, eos_token_id=None, pad_token_id=None,
                       tie_word_embeddings=False)


def build(name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model, made where it will stay, a matrix at a time."""
    from transformers import AutoModelForCausalLM

    shape, size = parse(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(shape), dtype=dtype, attn_implementation="sdpa")
    rotary = type(model.model.rotary_emb)(model.config).to(device)
    model = model.to_empty(device=device)
    model.model.rotary_emb = rotary
    _fill(model, size, shape)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _fill(model: nn.Module, size: float, shape: Shape) -> None:
    """Embeddings of size 1 in every dimension; branches that each add `size`/√layers of that, in directions of their own.

    The head reads the embedding off again, each token leading to another one, so that the branches decide between few candidates.
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    successor = torch.randperm(shape.vocab, generator=torch.Generator().manual_seed(0))
    embedding = None
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
            continue
        weight.normal_(0.0, 1.0, generator=generator)
        if "embed_tokens" in name:
            embedding = weight
        elif "lm_head" in name:
            assert embedding is not None
            weight.mul_(0.5).add_(embedding[successor.to(weight.device)])
            weight.mul_(weight.shape[1] ** -0.5)
        else:
            branch = size * shape.layers**-0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weight.mul_(branch * weight.shape[1] ** -0.5)
