"""The generic adapter: drives the unmodified modules of a Hugging Face model, one sub-layer at a time.

The modules only ever call `update(key, value, layer_idx)` on a cache, so a small view of ours stands in for theirs.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from skipsearch.cache import KVCache, PassPlan
from skipsearch.models.families import Family
from skipsearch.models.spec import ModelSpec


class _CacheView:
    """What an attention module sees of our cache during one pass."""

    __slots__ = ("cache", "plan")

    def __init__(self, cache: KVCache, plan: PassPlan):
        self.cache, self.plan = cache, plan

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(layer_idx, key, value, self.plan)


class HFAdapter:
    """A `ModelAdapter` over any model that a row of the families table describes. The model object is not altered."""

    def __init__(self, model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any = None):
        self.model, self.spec, self.tokenizer = model, spec, tokenizer
        self._embed, self._norm, self._head = (attrgetter(p)(model) for p in (family.embed, family.norm, family.head))
        self._rotary = attrgetter(family.rotary)(model)
        self._layers = [(getattr(layer, family.attn_norm), getattr(layer, family.attn),
                         getattr(layer, family.mlp_norm), getattr(layer, family.mlp)) for layer in attrgetter(family.layers)(model)]
        # What all blocks of one pass share, computed by the first of them: (plan, cache, view, rotary embedding).
        self._pass: tuple[PassPlan, KVCache, _CacheView, tuple[Tensor, Tensor]] | None = None

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.spec.n_layers, batch, capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embed(tokens)

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        attn_norm, attention, mlp_norm, feed_forward = self._layers[i]
        if attn:
            if self._pass is None or self._pass[0] is not plan or self._pass[1] is not cache:
                self._pass = (plan, cache, _CacheView(cache, plan), self._rotary(h, plan.positions))
            _, _, view, rotary = self._pass
            h = h + attention(hidden_states=attn_norm(h), position_embeddings=rotary,
                              attention_mask=plan.visible, past_key_values=view)[0]
        if mlp:
            h = h + feed_forward(mlp_norm(h))
        return h

    def head(self, h: Tensor) -> Tensor:
        return self._head(self._norm(h))
