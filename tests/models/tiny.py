"""A tiny random model of each family, and what the contract tests must know of it that the adapter is not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.mask import SkipMask
from skipsearch.models import ModelAdapter, adapt

VOCAB, LAYERS = 61, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}


@dataclass(frozen=True)
class Tiny:
    """family: `model_type`; config: what it says beside SHAPE.

    layers: path of the list of layers. attn, mlp: path, inside a layer, of the module whose output zeroed is that sub-layer's
    branch removed.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    layers: str = "model.layers"
    attn: str = "self_attn"
    mlp: str = "mlp"


TINY: dict[str, Tiny] = {
    "llama": Tiny("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Tiny("llama", {"tie_word_embeddings": True}),
    "mistral": Tiny("mistral", {"sliding_window": None}),
    "qwen2": Tiny("qwen2"),
    "qwen3": Tiny("qwen3", {"head_dim": 8}),
}


@cache
def hf_model(name: str) -> nn.Module:
    """The same object for every test: none of them may alter it, and one test makes sure that none does."""
    return new_hf_model(name)


def new_hf_model(name: str, **changes: Any) -> nn.Module:
    tiny = TINY[name]
    config = AutoConfig.for_model(tiny.family, **{**SHAPE, **tiny.config, **changes})
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return randomised(model).eval().requires_grad_(False)


def randomised(model: nn.Module) -> nn.Module:
    """Every weight drawn anew: an initialisation full of ones and zeros would hide a norm or a bias that is left out."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        if weight.ndim > 1:
            noise *= weight.shape[-1] ** -0.5
        else:
            noise = 0.3 * noise + (1.0 if name.endswith("weight") else 0.0)
        with torch.no_grad():
            weight.copy_(noise)
    return model


def some_tokens(n: int, seed: int = 2) -> Tensor:
    """[1, n] random token ids."""
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))


class Run:
    """Drives an adapter pass by pass, as decoding does: the port and nothing else."""

    def __init__(self, model: ModelAdapter, capacity: int = 64):
        self.model, self.cache = model, model.new_cache(1, capacity)
        self.planner = Planner(capacity, model.spec.device)

    def __call__(self, tokens: Tensor, mask: SkipMask | None = None) -> Tensor:
        """tokens: [1, T] -> logits [T, V] of a pass behind what is committed; commits nothing."""
        return self.layers(tokens, self.planner.chain(self.cache.length, tokens.shape[1]), mask)

    def commit(self, tokens: Tensor) -> Tensor:
        logits = self(tokens)
        self.cache.length += tokens.shape[1]
        return logits

    @torch.no_grad()
    def layers(self, tokens: Tensor, plan: PassPlan, mask: SkipMask | None) -> Tensor:
        return logits_of(self.model, tokens, self.cache, plan, mask)


def logits_of(model: ModelAdapter, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None) -> Tensor:
    h = model.embed(tokens)
    for i in range(model.spec.n_layers):
        h = model.block(i, h, cache, plan, attn=mask is None or i not in mask.attn, mlp=mask is None or i not in mask.mlp)
    return model.head(h)[0]


def adapted(name: str) -> ModelAdapter:
    return adapt(hf_model(name))


@torch.no_grad()
def full_logits(name: str, tokens: Tensor) -> Tensor:
    """[1, T] -> [T, V], of one forward of the Hugging Face model over everything, without a cache."""
    return hf_model(name)(input_ids=tokens, use_cache=False).logits[0]


def logits_without(name: str, tokens: Tensor, mask: SkipMask) -> Tensor:
    """The Hugging Face model's own forward with the branches of these sub-layers zeroed by hooks: [1, T] -> [T, V]."""
    tiny, model = TINY[name], hf_model(name)
    layers = attrgetter(tiny.layers)(model)
    branches = [attrgetter(tiny.attn)(layers[i]) for i in mask.attn] + [attrgetter(tiny.mlp)(layers[i]) for i in mask.mlp]
    with _zeroed(branches):
        return full_logits(name, tokens)


@contextmanager
def _zeroed(branches: list[nn.Module]) -> Iterator[None]:
    def zero(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    hooks = [branch.register_forward_hook(zero) for branch in branches]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
