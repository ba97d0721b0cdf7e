"""The adapter that runs the unmodified modules of a Hugging Face model, one sub-layer at a time.

The modules call only `update(key, value, layer_idx)` on their cache, so a small object replaces
it."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

from skipsearch.errors import ModelError
from skipsearch.models import attention_masks
from skipsearch.models.adapter import ModelSpec, PassRunner
from skipsearch.models.families.decompose import LayerKind, decompose_model
from skipsearch.models.families.table import Family
from skipsearch.models.families.unmodified import UnmodifiedModel
from skipsearch.models.kv_cache import KVCache, PassPlan


class _HFPassInputs:
    """The inputs of a pass: a replacement of transformers' cache, and arguments of attentions.

    Layers of one kind share their arguments.
    """

    __slots__ = ("attention_args", "cache", "plan")

    def __init__(self, plan: PassPlan, cache: KVCache):
        self.plan, self.cache = plan, cache
        self.attention_args: dict[int, dict[str, Any]] = {}

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.cache.write(layer_idx, key, value, self.plan)


class _LatestHFPass(threading.local):
    """The inputs of the latest pass of a thread. Several threads may share a model."""

    inputs: _HFPassInputs | None = None


class HFAdapter(UnmodifiedModel):
    """A `ModelAdapter` over a model with a row in the families table. The model is not altered."""

    pass_runner: PassRunner | None = None

    def __init__(self, model: nn.Module, spec: ModelSpec, family: Family, tokenizer: Any = None):
        self.model, self.spec, self.family, self.tokenizer = model, spec, family, tokenizer
        self._parts = decompose_model(model, family)
        self._layers = self._parts.layers
        self._kinds = list(dict.fromkeys(self._parts.kinds))
        self._kind_indices = [self._kinds.index(kind) for kind in self._parts.kinds]
        self._config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        self._latest_pass = _LatestHFPass()
        # Copy: a rotary module may cache angles for the length of its last text.
        self._rotary_lock = threading.Lock()

    @property
    def attention_spans(self) -> list[tuple[int | None, int | None]]:
        return [(kind.window, None) for kind in self._parts.kinds]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.spec.n_layers, batch, capacity)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        h = tokens
        for step in self._parts.embed_steps:
            h = step(h)
        if self._parts.positions is None:
            return h
        if positions is None:
            raise ModelError(
                f"{self.spec.family} adds learned positions to its embeddings: give embed the "
                "plan's positions too"
            )
        return h + self._parts.positions(positions)

    def block(
        self,
        i: int,
        h: Tensor,
        cache: KVCache,
        plan: PassPlan,
        *,
        attn: bool = True,
        mlp: bool = True,
    ) -> Tensor:
        layer = self._layers[i]
        if layer.device is not None:
            h = h.to(layer.device)
        return layer(
            h,
            self._get_attention_args(self._kind_indices[i], h, cache, plan) if attn else None,
            mlp,
        )

    def head(self, h: Tensor) -> Tensor:
        for step in self._parts.head_steps:
            h = step(h)
        return h

    def _get_attention_args(
        self, kind_index: int, h: Tensor, cache: KVCache, plan: PassPlan
    ) -> dict[str, Any]:
        """Return the arguments of an attention besides hidden states.

        The first layer of each kind makes them for the pass.
        """
        inputs = self._latest_pass.inputs
        if inputs is None or inputs.plan is not plan or inputs.cache is not cache:
            inputs = self._latest_pass.inputs = _HFPassInputs(plan, cache)
        args = inputs.attention_args.get(kind_index)
        if args is None:
            args = self._make_attention_args(self._kinds[kind_index], h, inputs)
            inputs.attention_args[kind_index] = args
        return args

    def _make_attention_args(
        self, kind: LayerKind, h: Tensor, pass_inputs: _HFPassInputs
    ) -> dict[str, Any]:
        family, config, plan = self.family, self._config, pass_inputs.plan
        args: dict[str, Any] = {
            **(family.extra_arguments or {}),
            family.cache_argument: pass_inputs,
        }
        if family.takes_positions:
            args["position_ids"] = plan.positions.to(kind.device)
        mask, bias = attention_masks.with_window(plan, kind.window), None
        if family.alibi:
            args["alibi"] = attention_masks.make_alibi_bias(
                attention_masks.get_key_positions(plan), config.num_attention_heads, h.dtype
            ).to(kind.device)
            bias = args["alibi"] / (config.hidden_size // config.num_attention_heads) ** 0.5
        # Without sdpa's causal pattern, or with a bias, the mask must be complete.
        if bias is not None or config._attn_implementation == "eager":
            mask = attention_masks.full_mask(plan) if mask is None else mask
            mask = attention_masks.make_additive(mask.to(kind.device), h.dtype, bias)
        args["attention_mask"] = mask if mask is None else mask.to(kind.device)
        if self._parts.rotary is not None:
            type_args = (kind.layer_type,) if family.rotary_takes_type else ()
            with self._rotary_lock:
                args["position_embeddings"] = self._parts.rotary(
                    h, plan.positions.to(kind.device), *type_args
                )
        return args
