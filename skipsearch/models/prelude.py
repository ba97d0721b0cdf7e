"""A model's own forward up to its layers: what it hands each of them, and what of the text it lets them see.

Layers do not run here, except in the one pass that finds out what each of them is made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.errors import ModelError
from skipsearch.models.sight import Sight, largest_span, read_sight
from skipsearch.models.spec import ModelSpec
from skipsearch.models.structure import Call, Discovery, LayerParts, Skeleton, Step
from skipsearch.models.view import View, cloned

FARTHEST = 1 << 16    # positions at which a model is asked what it sees
NEAREST = 64          # of a model that names no context
Given = tuple[tuple[Any, ...], dict[str, Any]]


class _Ran(Exception):
    """The first layer was reached, and no more was wanted."""


class _Capture:
    """A step whose layers do not run: what they are handed is kept, and the last one returns `h` if there is one."""

    def __init__(self, parts: list[LayerParts], h: Tensor | None = None, only_first: bool = False):
        self.parts, self.h, self.only_first = parts, h, only_first
        self.calls: list[Given] = []   # in the order of the layers

    def layer(self, i: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((args, kwargs))
        if self.only_first:
            raise _Ran
        last = self.h is not None and i == len(self.parts) - 1
        return self.parts[i].returned(self.h if last else hidden(args, kwargs))  # type: ignore[arg-type]

    def part(self, i: int, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs)


class _Noting(View):
    """Tells a discovery which layer attends, and which one keeps a state."""

    def __init__(self, plan: PassPlan, cache: KVCache, states: Sequence[Any], discovery: Discovery):
        super().__init__(plan, cache, states)
        self.discovery = discovery

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.discovery.attends(layer_idx)
        return super().update(key_states, value_states, layer_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.discovery.keeps(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.discovery.keeps(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


class OwnForward:
    """One model, read. parts and sights: of each layer. recurrent: whether a layer keeps a state.

    Raises: ModelError for a model that is not built of such layers.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec):
        self.spec, self.skeleton = spec, Skeleton(model, spec.n_layers)
        self._config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        known = inspect.signature(type(model).forward).parameters
        self._cache = "past_key_values" if "past_key_values" in known else "cache_params"
        self._takes_positions, self._keeps_last = "position_ids" in known, "logits_to_keep" in known
        with torch.no_grad():
            self._no_states = list(DynamicCache(config=self._config).layers)
            self.parts = self._discovered()
            self.recurrent = any(parts.recurrent for parts in self.parts)
            if not self.recurrent:
                self._no_states = []
            self.sights = self._seen()

    def during(self, step: Step, tokens: Tensor, positions: Tensor, view: View, last_only: bool = False) -> Tensor:
        """Its forward while `step` says what the layers do: logits [B, T, V], or [B, 1, V] with last_only."""
        logits: Tensor = self.skeleton.during(step, lambda: self._forward(tokens, positions, view, last_only))
        return logits[:, -1:] if last_only else logits

    def captured(self, tokens: Tensor, positions: Tensor, *, plan: PassPlan | None = None, cache: KVCache | None = None,
                 only_first: bool = False) -> list[Given]:
        """(args, kwargs) of every layer, or of the first, of a pass that runs none of them."""
        view = View(plan or self._flat(tokens, positions), cache, self.no_states())
        step = _Capture(self.parts, only_first=only_first)
        with suppress(_Ran):
            self.skeleton.during(step, lambda: self._forward(tokens, positions, view, last_only=True))
        return step.calls

    def head(self, h: Tensor) -> Tensor:
        """What its forward makes of the last layer's states: [B, T, H] -> [B, T, V]."""
        tokens = torch.zeros(h.shape[:2], dtype=torch.long, device=h.device)
        step = _Capture(self.parts, h)
        view = View(self._flat(tokens, tokens), None, self.no_states())
        logits: Tensor = self.skeleton.during(step, lambda: self._forward(tokens, tokens, view))
        return logits

    def no_states(self) -> list[Any]:
        """What layers keep before the first token, as its own cache has it."""
        return [cloned(state) for state in self._no_states]

    def own_sight(self, start: int) -> list[Any]:
        """The mask that its own forward hands each layer for two tokens behind `start` others."""
        plan = Planner(start + 2, self.spec.device).chain(start, 2)
        calls = self.captured(torch.zeros(1, 2, dtype=torch.long, device=self.spec.device), plan.positions, plan=plan)
        return [named(names, args, kwargs).get("attention_mask")
                for names, (args, kwargs) in zip(self.skeleton.arguments, calls, strict=True)]

    @torch.no_grad()
    def refuse_other_inputs(self) -> None:
        """Raises: ModelError where layers are handed something that comes from the tokens and is not the states before them."""
        plan = Planner(2, self.spec.device).chain(0, 2)
        first, second = (self.captured(plan.slots * 0 + token, plan.positions, plan=plan) for token in (0, 1))
        for (args, kwargs), (others, their_kwargs), names in zip(first, second, self.skeleton.arguments, strict=True):
            one, two = named(names, args, kwargs), named(names, others, their_kwargs)
            for name in one.keys() - {names[0]}:
                if isinstance(one[name], Tensor) and not torch.equal(one[name], two[name]):
                    raise ModelError(f"its layers are handed {name}, which is made from the tokens")

    def _forward(self, tokens: Tensor, positions: Tensor, view: View, last_only: bool = False) -> Tensor:
        options: dict[str, Any] = {}
        if self._takes_positions:
            options["position_ids"] = positions
        if self._keeps_last:
            options["logits_to_keep"] = 1 if last_only else 0
        out = self.skeleton.model(input_ids=tokens, use_cache=True, **{self._cache: view}, **options)
        logits: Tensor = out[0] if isinstance(out, tuple) else out.logits
        return logits

    def _flat(self, tokens: Tensor, positions: Tensor) -> PassPlan:
        return PassPlan(positions, positions, tokens.shape[1], None, 0, chain=True)

    def _discovered(self) -> list[LayerParts]:
        discovery, cache = Discovery(self.skeleton), KVCache(self.spec.n_layers, 1, 3)
        plan = Planner(3, self.spec.device).chain(0, 3)
        view = _Noting(plan, cache, self.no_states(), discovery)
        self.skeleton.during(discovery, lambda: self._forward(plan.slots * 0, plan.positions, view))
        recurrent = any(parts.recurrent for parts in discovery.parts)   # such models may have layers that are an MLP alone
        lacking = next((i for i, parts in enumerate(discovery.parts) if not (parts.mixers or (recurrent and parts.off))), None)
        if lacking is not None:
            raise ModelError(f"layer {lacking} writes nothing to transformers' own cache")
        return discovery.parts

    def _seen(self) -> list[Sight]:
        span, chunk = largest_span(self._config), getattr(self._config, "attention_chunk_size", None)
        start = min(self.spec.context or max(4 * span, NEAREST), FARTHEST) - 2
        found: dict[int | None, Sight] = {}
        masks = self.own_sight(start)
        for mask in masks:
            key = None if mask is None else id(mask)
            if key not in found:
                found[key] = read_sight(mask, start, chunk)
        for sight in set(found.values()):
            self._refuse_other_boundary(sight, [i for i, mask in enumerate(masks) if found[None if mask is None else id(mask)] == sight])
        return [found[None if mask is None else id(mask)] for mask in masks]

    def _refuse_other_boundary(self, sight: Sight, layers: list[int]) -> None:
        """Raises: ModelError where the first token that a window or a chunk hides is another one in the model's own mask."""
        span = sight.window or sight.chunk
        if span is None:
            return
        plan = Planner(span + 1, self.spec.device).chain(span - 1, 2)
        own = self.own_sight(span - 1)
        for i in layers:
            if own[i] is None or not torch.equal(own[i][:, :, :, :plan.keys], sight.mask(plan, own[i].dtype)):
                raise ModelError(f"the own mask of layer {i} is no {'window' if sight.window else 'chunk'} of {span} where that begins")


def hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def with_hidden(given: Given, h: Tensor) -> Given:
    args, kwargs = given
    return ((h, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": h})


def named(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    return dict(zip(names, args, strict=False)) | kwargs
