"""Tiny models that draft well but not perfectly without any training, and what the full model says,
found without skipsearch.

Every embedding is large and every residual branch small, so that leaving branches out changes the
next token often, not always."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from skipsearch.engine.cuda_graph import GraphAdapter
from skipsearch.engine.engines import wrap_engine
from skipsearch.engine.native import to_native_quantized
from skipsearch.engine.native.blocks import round_weight
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model
from skipsearch.models.loading.loaded_model import LoadedModel
from skipsearch.models.loading.quantize import (
    KV_ENDINGS,
    name_with_activations,
    split_kv_cache_dtype,
)

# Weights of 8 bits, whose float activations Hugging Face's modules can reproduce.
NATIVE_8BIT = name_with_activations("native-8bit", "float")
NATIVE_INT8_KV = NATIVE_8BIT + KV_ENDINGS["int8"]  # the same weights with K/V in 8 bits
KV_GROUP = 32  # numbers of K/V that share a scale
LAYERS = 5
VOCAB = 64


def tiny_llama(
    seed: int = 0,
    *,
    layers: int = LAYERS,
    vocab: int = VOCAB,
    hidden: int = 32,
    context: int = 256,
    attn: float = 0.35,
    mlp: float = 0.2,
    eos: int | list[int] | None = None,
    head_dim: int | None = None,
) -> LlamaForCausalLM:
    """A random fp64 Llama. attn, mlp: size of the residual branches beside an embedding of size 1;
    smaller drafts better. head_dim: of its two heads; None: half of `hidden`.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    scales = {"o_proj": attn, "down_proj": mlp, "q_proj": 3.0, "k_proj": 3.0}
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            module = name.split(".")[-2]
            fan_in = 1 if module in ("embed_tokens", "lm_head") else weight.shape[1]
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(noise * scales.get(module, 1.0) * fan_in**-0.5)
    return model


@torch.no_grad()
def round_matrices(model: Any, bits: int = 8) -> Any:
    """The model itself, each matrix of it rounded, head and experts included, routers not. A tied
    embedding is rounded with the head.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("shared_expert_gate"):
            module.weight.copy_(round_weight(module.weight, bits))
        if name.endswith(".experts"):
            for weight in (module.gate_up_proj, module.down_proj):
                rows = weight.transpose(1, 2) if module.is_transposed else weight
                rows.copy_(round_weight(rows.flatten(0, 1), bits).view(rows.shape))
    return model


def to_native_8bit(hf: Any, kv_cache_dtype: str = "auto") -> Any:
    """The model on the engine native with weights of 8 bits and float activations.

    It takes the weights of `hf` over.
    """
    loaded = LoadedModel(hf, adapt(hf).spec, family_of(hf.config), None)
    model = to_native_quantized(loaded, "native-8bit", 8, "float")
    model.use_kv_cache_dtype(kv_cache_dtype)
    return model


def round_kv(rows: Tensor) -> Tensor:
    """Keys or values [..., D], each group of `KV_GROUP` rounded to 255 steps of its largest."""
    return torch.cat([_round_group(group) for group in rows.split(KV_GROUP, dim=-1)], dim=-1)


def _round_group(group: Tensor) -> Tensor:
    values = group.float()
    largest = values.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros_like(largest))
    return (values * inverse).round().to(group.dtype) * (largest / 127).to(group.dtype)


class RoundedCache(DynamicCache):
    """Transformers' own cache, with K/V in 8 bits."""

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **named: Any) -> Any:
        return super().update(round_kv(key_states), round_kv(value_states), *rest, **named)


def with_eos(model: ModelAdapter, *eos: int) -> ModelAdapter:
    """The same weights with other end-of-sequence tokens."""
    other = copy(model)
    other.spec = replace(other.spec, eos_token_ids=eos)
    return other


def with_tokenizer(model: ModelAdapter, tokenizer: Any) -> ModelAdapter:
    other = copy(model)
    other.tokenizer = tokenizer
    return other


class FullModel:
    """What the unmodified model itself generates: Hugging Face's own forward, with a cache of its
    own.

    make_cache: what its forward keeps K/V in; None: what it takes by itself.
    """

    def __init__(self, hf: Any, make_cache: Callable[[], DynamicCache | None] = lambda: None):
        self.hf, self.make_cache = hf, make_cache
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._logits: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        tokens = self._texts.setdefault(tuple(prompt), [])
        unread, past = [*prompt, *tokens], self.make_cache()
        while len(tokens) < n:
            said = self.hf(torch.tensor([unread]), past_key_values=past, use_cache=True)
            past = said.past_key_values
            tokens.append(int(said.logits[0, -1].argmax()))
            unread = tokens[-1:]
        return tokens[:n]

    def next_logits(self, history: Sequence[int]) -> NDArray[np.float64]:
        text = tuple(history)
        if text not in self._logits:
            said = self.hf(torch.tensor([text]), past_key_values=self.make_cache())
            self._logits[text] = said.logits[0, -1].numpy()
        return self._logits[text].copy()


def tiny_model_and_reference(seed: int = 0) -> tuple[ModelAdapter, FullModel]:
    """The model that most tests share, driven by the engine of the moment on its device; the full
    model's own view is on the CPU.
    """
    engine = _engine.get()
    return _make_driven_model(seed, engine, _device.get()), _make_reference(
        seed, *_describe_engine(engine)
    )


@contextmanager
def use_engine(engine: str, device: str = "cpu") -> Iterator[None]:
    """While it lasts, `small_world` is driven by this engine, which may be `graph` on a CPU, or
    native with weights, or K/V too, of 8 bits by their name: another model, so the full model is
    another one too."""
    engine_before, device_before = _engine.set(engine), _device.set(device)
    try:
        yield
    finally:
        _engine.reset(engine_before)
        _device.reset(device_before)


def current_device() -> str:
    """The device of `tiny_model_and_reference`."""
    return _device.get()


@pytest.fixture(autouse=True)
def lean_engine() -> Iterator[None]:
    """Let a folder that imports this decode in half the time of the model's own modules."""
    with use_engine("lean"):
        yield


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """Let the tests of a file in such a folder run the model's own modules."""
    with use_engine("hf"):
        yield


_engine: ContextVar[str] = ContextVar("engine", default="hf")
_device: ContextVar[str] = ContextVar("device", default="cpu")


def _describe_engine(engine: str) -> tuple[bool, bool]:
    """Whether weights have 8 bits, and whether K/V have."""
    base, kv_cache_dtype = split_kv_cache_dtype(engine)
    return base == NATIVE_8BIT, kv_cache_dtype == "int8"


@cache
def _make_reference(seed: int, eight_bits: bool = False, int8_kv: bool = False) -> FullModel:
    return _make_full_model(tiny_llama(seed), eight_bits, int8_kv)


def _make_full_model(hf: Any, eight_bits: bool, int8_kv: bool) -> FullModel:
    hf = round_matrices(hf) if eight_bits else hf
    return FullModel(hf, RoundedCache) if int8_kv else FullModel(hf)


def model_and_reference(make: Callable[[], LlamaForCausalLM]) -> tuple[ModelAdapter, FullModel]:
    """As `small_world`, of another model. make: the same weights at every call."""
    engine = _engine.get()
    return _wrap_engine(engine, make().to(_device.get())), _make_full_model(
        make(), *_describe_engine(engine)
    )


@cache
def _make_driven_model(seed: int, engine: str, device: str) -> ModelAdapter:
    own = (
        tiny_llama(seed).to(device)
        if engine != "hf" or device != "cpu"
        else _make_reference(seed).hf
    )
    return _wrap_engine(engine, own)


def _wrap_engine(engine: str, hf: LlamaForCausalLM) -> ModelAdapter:
    """The model under an engine, which may take its weights over."""
    eight_bits, int8_kv = _describe_engine(engine)
    if eight_bits:
        return to_native_8bit(hf, "int8" if int8_kv else "auto")
    model = adapt(hf)
    if engine == "hf":
        return model
    lean = fuse_model(hf, replace(model.spec, engine="lean"), family_of(hf.config))
    return GraphAdapter(lean) if engine == "graph" else wrap_engine(lean, engine)
