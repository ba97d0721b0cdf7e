"""Models of a given shape with random weights, to measure speed without the real weights.

The names are `synthetic:llama-2-13b` or `synthetic:LAYERSxWIDTH`, such as `synthetic:24x512`. An
optional `@VOCABULARY` follows, the number of tokens, an optional `+EXPERTSxCHOSEN`, such as
`synthetic:16x1024+32x4`, and an optional `/SIZE`: the size of all residual branches together,
relative to the embedding. With experts, the shape is Mixtral's: each layer has so many MLPs, whose
widths together make up the MLP of a Llama `CHOSEN` at a time, and random routers choose by the
text. A draft that skips branches predicts the full
model's token more often if SIZE is small. Without half of the branches, it does so almost always at
1 and hardly ever at 8."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from skipsearch.core.registry import unknown_name
from skipsearch.errors import ModelError
from skipsearch.models.loading.weight_files import StoredTensor

PREFIX = "synthetic:"
BRANCH_SCALE = 2.0  # the default SIZE
VOCAB_SIZE = 32_000  # the default VOCABULARY, that of Llama 2
MAX_VOCAB_SIZE = 2**20


@dataclass(frozen=True)
class SyntheticShape:
    """The shape of a Llama model, or of a Mixtral model if it has experts."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    context_length: int
    n_experts: int = 0
    experts_per_token: int = 0


SHAPES = {
    "llama-2-7b": SyntheticShape(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": SyntheticShape(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": SyntheticShape(80, 8192, 28672, 64, 8, 32000, 4096),
    "llama-3-8b": SyntheticShape(32, 4096, 14336, 32, 8, 128256, 8192),
    "phi-3-mini": SyntheticShape(32, 3072, 8192, 32, 32, 32064, 4096),
}


def is_synthetic(name: str) -> bool:
    return name.startswith(PREFIX)


def parse_synthetic_name(name: str) -> tuple[SyntheticShape, float]:
    """Return shape and branch scale. Raises: ModelError."""
    sized_name, _, size = name.removeprefix(PREFIX).partition("/")
    sized_name, _, experts = sized_name.partition("+")
    shape_name, _, vocabulary = sized_name.partition("@")
    match = re.fullmatch(r"(\d{1,3})x(\d{2,5})", shape_name)
    if shape_name not in SHAPES and match is None:
        raise ModelError(
            f"{unknown_name('synthetic model', shape_name, SHAPES)}; or LAYERSxWIDTH, such as "
            f"{PREFIX}24x512"
        )
    try:
        branch_scale = float(size) if size else BRANCH_SCALE
    except ValueError:
        branch_scale = -1.0
    if not 0 < branch_scale <= 100:
        raise ModelError(
            f"{name}: the size of its branches is {size!r}; write a number above 0, such as "
            f"{PREFIX}{shape_name}/{BRANCH_SCALE}"
        )
    if vocabulary and not (vocabulary.isdecimal() and 2 <= int(vocabulary[:8]) <= MAX_VOCAB_SIZE):
        raise ModelError(
            f"{name}: its vocabulary is {vocabulary[:40]!r}; write a number of tokens from 2 to "
            f"{MAX_VOCAB_SIZE:,}, such as {PREFIX}{shape_name}@{VOCAB_SIZE}"
        )
    shape = (
        SHAPES[shape_name]
        if match is None
        else _scaled_llama_shape(name, int(match[1]), int(match[2]))
    )
    if experts:
        shape = _add_experts(name, shape, experts)
    return (replace(shape, vocab_size=int(vocabulary)) if vocabulary else shape), branch_scale


def _add_experts(name: str, shape: SyntheticShape, text: str) -> SyntheticShape:
    """Split the MLP of a shape into experts. text: such as `32x4`. Raises: ModelError."""
    match = re.fullmatch(r"(\d{1,3})x(\d{1,3})", text)
    n_experts, per_token = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= per_token <= n_experts:
        raise ModelError(
            f"{name}: its experts are {text[:40]!r}; write their number and how many a token "
            "reads, such as +32x4"
        )
    width = max(1, round(shape.intermediate_size / per_token / 32)) * 32
    return replace(shape, intermediate_size=width, n_experts=n_experts, experts_per_token=per_token)


def _scaled_llama_shape(name: str, n_layers: int, hidden_size: int) -> SyntheticShape:
    """Return a shape with Llama's proportions.

    Heads have 64 dimensions. The MLP has 2.75 times the width, rounded to a multiple of 64.
    """
    if hidden_size % 64 or not n_layers:
        raise ModelError(
            f"{name}: its heads are 64 wide, so its width is a multiple of 64; write "
            f"{PREFIX}{max(1, n_layers)}x{max(64, hidden_size // 64 * 64)}"
        )
    return SyntheticShape(
        n_layers,
        hidden_size,
        intermediate_size=round(hidden_size * 2.75 / 64) * 64,
        n_heads=hidden_size // 64,
        n_kv_heads=hidden_size // 64,
        vocab_size=VOCAB_SIZE,
        context_length=8192,
    )


def list_synthetic_tensors(shape: SyntheticShape) -> list[StoredTensor]:
    """Return one tensor with the size of all matrices, for the check of memory."""
    width, kv_width = shape.hidden_size, shape.hidden_size // shape.n_heads * shape.n_kv_heads
    mlps = max(1, shape.n_experts) * 3 * width * shape.intermediate_size
    layer = 2 * width * width + 2 * width * kv_width + mlps
    return [StoredTensor("model", (shape.n_layers * layer + 2 * width * shape.vocab_size,), None)]


def make_synthetic_config(shape: SyntheticShape) -> Any:
    from transformers import LlamaConfig, MixtralConfig

    experts = {
        "num_local_experts": shape.n_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "sliding_window": None,
    }
    make = MixtralConfig if shape.n_experts else LlamaConfig
    return make(
        **(experts if shape.n_experts else {}),
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=shape.context_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def build_synthetic_model(name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build a model directly on its device, one matrix at a time."""
    from transformers import AutoModelForCausalLM

    shape, branch_scale = parse_synthetic_name(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            make_synthetic_config(shape), dtype=dtype, attn_implementation="sdpa"
        )
    rotary = type(model.model.rotary_emb)(model.config).to(device)
    model = model.to_empty(device=device)
    model.model.rotary_emb = rotary
    _fill_weights(model, branch_scale, shape)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _fill_weights(model: nn.Module, branch_scale: float, shape: SyntheticShape) -> None:
    """Fill the weights with random values of known sizes.

    Embeddings have size 1 in every dimension, and each branch adds `branch_scale`/√layers of this
    size in a random direction. The head is built from the embedding of each token's predecessor.
    Each token therefore leads to one other token, and the branches decide between few
    candidates.
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    successor = torch.randperm(shape.vocab_size, generator=torch.Generator().manual_seed(0))
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
            branch = (
                branch_scale * shape.n_layers**-0.5
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                else 1.0
            )
            weight.mul_(branch * weight.shape[-1] ** -0.5)
