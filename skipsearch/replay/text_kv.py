"""The full model's K/V of whole texts, which replay copies instead of computing them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.engine import forward, no_grad, run_layers
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, Planner

# Share of the free memory for K/V. Activations, logits, a decoder's cache and other processes need
# memory, too.
KV_MEMORY_FRACTION = 0.25


@dataclass(frozen=True)
class TextKV:
    """K/V of a text, for each layer [heads, tokens, D]; None: the layer has none of its own.

    The last token of the text is missing: nothing has read it yet.
    """

    keys: tuple[Tensor | None, ...]
    values: tuple[Tensor | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values) if buffer is not None)

    def copy_to(self, cache: KVCache, row: int, n_tokens: int) -> None:
        """Write the K/V of the first tokens to a row of a cache."""
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys is not None and values is not None:
                buffers = cache.get_buffers(layer, keys[None], values[None])
                for buffer, source in zip(buffers, (keys, values), strict=True):
                    buffer[row, :, :n_tokens] = source[:, :n_tokens]


def copy_text_kv(cache: KVCache, row: int, n_tokens: int) -> TextKV:
    """Return a copy of the K/V of the first tokens of a row."""
    keys, values = (
        tuple(None if buffer is None else buffer[row, :, :n_tokens].clone() for buffer in side)
        for side in (cache.keys, cache.values)
    )
    return TextKV(keys, values)


@no_grad
def compute_text_kv(model: ModelAdapter, text: Sequence[int]) -> TextKV | None:
    """Return the K/V of a text by one pass over it; None if the model's cache is no plain one."""
    cache, planner = model.new_cache(1, len(text)), Planner(len(text), model.spec.device)
    if type(cache) is not KVCache:
        return None
    tokens = torch.tensor([text], device=model.spec.device)
    forward(model, tokens, cache, planner.plan_chain(0, len(text)), last_only=True)
    return copy_text_kv(cache, 0, len(text))


@no_grad
def bytes_of_a_slot(model: ModelAdapter) -> int:
    """Return the bytes of one token's K/V."""
    cache, device = model.new_cache(1, 1), model.spec.device
    plan = Planner(1, device).plan_chain(0, 1)
    run_layers(
        model,
        model.embed(torch.zeros(1, 1, dtype=torch.long, device=device), plan.positions),
        cache,
        plan,
    )
    return cache.nbytes
