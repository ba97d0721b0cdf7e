"""The generic adapter: drives the unmodified modules of a Hugging Face model, one sub-layer at a time.

The modules only ever call `update(key, value, layer_idx)` on a cache, so a small view of ours stands in for theirs.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

from skipsearch.cache import KVCache, PassPlan
from skipsearch.errors import ModelError
from skipsearch.models import masks
from skipsearch.models.families import Family
from skipsearch.models.layout import LayerKind, take_apart
from skipsearch.models.spec import ModelSpec, PassRunner
from skipsearch.models.weighed import Weighed


class _Pass:
    """One pass as its layers see it: our cache in the place of transformers' own, and arguments that layers of one kind share."""

    __slots__ = ("cache", "inputs", "plan")

    def __init__(self, plan: PassPlan, cache: KVCache):
        self.plan, self.cache = plan, cache
        self.inputs: dict[int, dict[str, Any]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(layer_idx, key, value, self.plan)


class _LatestPass(threading.local):
    """The pass that this thread is in: one model serves several threads."""

    shared: _Pass | None = None


class HFAdapter(Weighed):
    """A `ModelAdapter` over any model that a row of the families table describes. The model object is not altered."""

    passes: PassRunner | None = None

    def __init__(self, model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any = None):
        self.model, self.spec, self.family, self.tokenizer = model, spec, family, tokenizer
        self._parts = take_apart(model, family)
        self._layers = self._parts.layers
        self._kinds = list(dict.fromkeys(self._parts.kinds))
        self._kind_of = [self._kinds.index(kind) for kind in self._parts.kinds]
        self._config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        self._latest = _LatestPass()
        self._turning = threading.Lock()  # a rotary module may keep angles for the length of the text it saw last

    @property
    def spans(self) -> list[tuple[int | None, int | None]]:
        return [(kind.window, None) for kind in self._parts.kinds]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.spec.n_layers, batch, capacity)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        h = tokens
        for piece in self._parts.before:
            h = piece(h)
        if self._parts.positions is None:
            return h
        if positions is None:
            raise ModelError(f"{self.spec.family} adds learned positions to its embeddings: give embed the plan's positions too")
        return h + self._parts.positions(positions)

    def block(self, i: int, h: Tensor, cache: KVCache, plan: PassPlan, *, attn: bool = True, mlp: bool = True) -> Tensor:
        layer = self._layers[i]
        if layer.device is not None:
            h = h.to(layer.device)
        return layer(h, self._inputs(self._kind_of[i], h, cache, plan) if attn else None, mlp)

    def head(self, h: Tensor) -> Tensor:
        for piece in self._parts.after:
            h = piece(h)
        return h

    def _inputs(self, kind: int, h: Tensor, cache: KVCache, plan: PassPlan) -> dict[str, Any]:
        """Arguments of an attention beside its hidden states, made by the first layer of its kind in a pass."""
        shared = self._latest.shared
        if shared is None or shared.plan is not plan or shared.cache is not cache:
            shared = self._latest.shared = _Pass(plan, cache)
        inputs = shared.inputs.get(kind)
        if inputs is None:
            inputs = shared.inputs[kind] = self._new_inputs(self._kinds[kind], h, shared)
        return inputs

    def _new_inputs(self, kind: LayerKind, h: Tensor, shared: _Pass) -> dict[str, Any]:
        family, config, plan = self.family, self._config, shared.plan
        inputs: dict[str, Any] = {**(family.extra_arguments or {}), family.cache_argument: shared}
        mask, bias = masks.windowed(plan, kind.window), None
        if family.alibi:
            inputs["alibi"] = masks.alibi(masks.key_positions(plan), config.num_attention_heads, h.dtype).to(kind.device)
            bias = inputs["alibi"] / (config.hidden_size // config.num_attention_heads) ** 0.5
        if bias is not None or config._attn_implementation == "eager":  # no kernel fills in the causal pattern here
            mask = masks.additive((masks.visible(plan) if mask is None else mask).to(kind.device), h.dtype, bias)
        inputs["attention_mask"] = mask if mask is None else mask.to(kind.device)
        if self._parts.rotary is not None:
            of_type = (kind.layer_type,) if family.rotary_by_type else ()
            with self._turning:
                inputs["position_embeddings"] = self._parts.rotary(h, plan.positions.to(kind.device), *of_type)
        return inputs
