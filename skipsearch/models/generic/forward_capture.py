"""Capture the arguments that a model's own forward passes to each layer, and attention patterns.

Layers do not run during a capture, except in one pass that finds the parts of each layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from skipsearch.errors import ModelError
from skipsearch.models.adapter import ModelSpec
from skipsearch.models.generic.attention_pattern import (
    AttentionPattern,
    infer_pattern,
    widest_window,
)
from skipsearch.models.generic.cache_view import TransformersCacheView, clone_state
from skipsearch.models.generic.instrument import (
    ForwardCall,
    InstrumentedModel,
    Interceptor,
    LayerParts,
    StructureProbe,
)
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

MAX_PROBE_POSITION = 1 << 16  # position at which masks are read
MIN_PROBE_POSITION = 64  # the same, if the config names no context
LayerArgs = tuple[tuple[Any, ...], dict[str, Any]]  # (args, kwargs) of a layer's forward


class _StopForward(Exception):
    """An exception that stops a forward after the first layer's arguments were recorded."""


class _LayerArgsRecorder:
    """An interceptor that records the arguments of layers and does not run them.

    last_hidden: output of the last layer; None: each layer returns its input.
    """

    def __init__(
        self, parts: list[LayerParts], last_hidden: Tensor | None = None, only_first: bool = False
    ):
        self.parts, self.last_hidden, self.only_first = parts, last_hidden, only_first
        self.layer_args: list[LayerArgs] = []  # in the order of the layers

    def on_layer(
        self, i: int, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.layer_args.append((args, kwargs))
        if self.only_first:
            raise _StopForward
        last = self.last_hidden is not None and i == len(self.parts) - 1
        return self.parts[i].wrap_output(self.last_hidden if last else hidden_arg(args, kwargs))  # type: ignore[arg-type]

    def on_part(
        self, i: int, name: str, call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return call(*args, **kwargs)


class _DiscoveryCacheView(TransformersCacheView):
    """A cache view that notes, for a probe, which layers write K/V or a recurrent state."""

    def __init__(
        self, plan: PassPlan, cache: KVCache, states: Sequence[Any], probe: StructureProbe
    ):
        super().__init__(plan, cache, states)
        self.probe = probe

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.probe.note_attention(layer_idx)
        return super().update(key_states, value_states, layer_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.probe.note_state(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.probe.note_state(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


class CapturedForward:
    """A model with the parts and the attention pattern of each layer.

    Raises: ModelError if the structure of the model cannot be read.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec):
        self.spec, self.instrumented = spec, InstrumentedModel(model, spec.n_layers)
        self._config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_argument = (
            "past_key_values" if "past_key_values" in parameters else "cache_params"
        )
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        with torch.no_grad():
            self._initial_states = list(DynamicCache(config=self._config).layers)
            probe = self._probe_layers()
            self.parts, self.lending_layers = probe.parts, frozenset(probe.lending_layers)
            # Whether a layer has a recurrent state.
            self.recurrent = any(parts.recurrent for parts in self.parts)
            if not self.recurrent:
                self._initial_states = []
            self.attention_patterns = self._read_patterns()

    def run_with(
        self,
        interceptor: Interceptor,
        tokens: Tensor,
        positions: Tensor,
        view: TransformersCacheView,
        last_only: bool = False,
    ) -> Tensor:
        """Run the model's own forward, with `interceptor` in place of the layers.

        Returns: logits [B, T, V], or [B, 1, V] with last_only.
        """
        logits: Tensor = self.instrumented.run_with(
            interceptor, lambda: self._forward(tokens, positions, view, last_only)
        )
        return logits[:, -1:] if last_only else logits

    def capture_layer_args(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        plan: PassPlan | None = None,
        cache: KVCache | None = None,
        only_first: bool = False,
    ) -> list[LayerArgs]:
        """Return (args, kwargs) of all layers, or of the first one, without running layers."""
        view = TransformersCacheView(
            plan or self._make_flat_plan(tokens, positions), cache, self.make_initial_states()
        )
        recorder = _LayerArgsRecorder(self.parts, only_first=only_first)
        with suppress(_StopForward):
            self.instrumented.run_with(
                recorder, lambda: self._forward(tokens, positions, view, last_only=True)
            )
        return recorder.layer_args

    def head(self, h: Tensor) -> Tensor:
        """Run the part of the forward after the last layer, [B, T, H] -> [B, T, V]."""
        tokens = torch.zeros(h.shape[:2], dtype=torch.long, device=h.device)
        recorder = _LayerArgsRecorder(self.parts, h)
        view = TransformersCacheView(
            self._make_flat_plan(tokens, tokens), None, self.make_initial_states()
        )
        logits: Tensor = self.instrumented.run_with(
            recorder, lambda: self._forward(tokens, tokens, view)
        )
        return logits

    def make_initial_states(self) -> list[Any]:
        """Return the states of layers before the first token, made by the model's own cache."""
        return [clone_state(state) for state in self._initial_states]

    def own_masks_at(self, start: int) -> list[Any]:
        """Return the mask that each layer gets from the forward for two tokens after `start`."""
        plan = Planner(start + 2, self.spec.device).plan_chain(start, 2)
        calls = self.capture_layer_args(
            torch.zeros(1, 2, dtype=torch.long, device=self.spec.device), plan.positions, plan=plan
        )
        return [
            bind_arguments(names, args, kwargs).get("attention_mask")
            for names, (args, kwargs) in zip(self.instrumented.layer_arg_names, calls, strict=True)
        ]

    @torch.no_grad()
    def reads_tokens(self) -> bool:
        """Return whether layers get inputs besides hidden states that are made from the tokens."""
        plan = Planner(2, self.spec.device).plan_chain(0, 2)
        first, second = (
            self.capture_layer_args(plan.slots * 0 + token, plan.positions, plan=plan)
            for token in (0, 1)
        )
        for (first_args, first_kwargs), (second_args, second_kwargs), names in zip(
            first, second, self.instrumented.layer_arg_names, strict=True
        ):
            first_named = bind_arguments(names, first_args, first_kwargs)
            second_named = bind_arguments(names, second_args, second_kwargs)
            for name in first_named.keys() - {names[0]}:
                if isinstance(first_named[name], Tensor) and not torch.equal(
                    first_named[name], second_named[name]
                ):
                    return True
        return False

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: TransformersCacheView,
        last_only: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {}
        if self._takes_positions:
            options["position_ids"] = positions
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = self._rows_with_logits(tokens) if last_only else 0
        out = self.instrumented.model(
            input_ids=tokens, use_cache=True, **{self._cache_argument: view}, **options
        )
        logits: Tensor = out[0] if isinstance(out, tuple) else out.logits
        return logits

    def _rows_with_logits(self, tokens: Tensor) -> int | Tensor:
        """Return the last row, in a form in which the forward runs all rows through all layers.

        Given a number, models with shared K/V run the last layers for these rows alone.
        """
        return tokens.new_tensor([tokens.shape[1] - 1]) if self.lending_layers else 1

    def _make_flat_plan(self, tokens: Tensor, positions: Tensor) -> PassPlan:
        return PassPlan(positions, positions, tokens.shape[1], None, 0, is_chain=True)

    def _probe_layers(self) -> StructureProbe:
        """Run one pass and return what it showed of each layer."""
        probe, cache = StructureProbe(self.instrumented), KVCache(self.spec.n_layers, 1, 3)
        plan = Planner(3, self.spec.device).plan_chain(0, 3)
        view = _DiscoveryCacheView(plan, cache, self.make_initial_states(), probe)
        self.instrumented.run_with(
            probe, lambda: self._forward(plan.slots * 0, plan.positions, view)
        )
        # Recurrent models may have layers that are an MLP alone.
        recurrent = any(parts.recurrent for parts in probe.parts)
        without_cache = next(
            (
                i
                for i, parts in enumerate(probe.parts)
                if not (parts.token_mixers or (recurrent and parts.null_outputs))
            ),
            None,
        )
        if without_cache is not None:
            raise ModelError(f"layer {without_cache} writes nothing to transformers' own cache")
        return probe

    def _read_patterns(self) -> list[AttentionPattern]:
        """Return the attention pattern of each layer."""
        span = widest_window(self._config)
        chunk = getattr(self._config, "attention_chunk_size", None)
        start = (
            min(self.spec.context_length or max(4 * span, MIN_PROBE_POSITION), MAX_PROBE_POSITION)
            - 2
        )
        masks = self.own_masks_at(start)
        distinct = {id(mask): mask for mask in masks}
        by_mask = {key: infer_pattern(mask, start, chunk) for key, mask in distinct.items()}
        patterns = [by_mask[id(mask)] for mask in masks]
        for pattern in set(patterns):
            self._check_boundary(pattern, [i for i, p in enumerate(patterns) if p == pattern])
        return patterns

    def _check_boundary(self, pattern: AttentionPattern, layers: list[int]) -> None:
        """Check the position at which a window or a chunk begins.

        Raises: ModelError if the model's own mask hides other tokens than the pattern.
        """
        span = pattern.window or pattern.chunk
        if span is None:
            return
        plan = Planner(span + 1, self.spec.device).plan_chain(span - 1, 2)
        own_masks = self.own_masks_at(span - 1)
        for i in layers:
            if own_masks[i] is None or not torch.equal(
                own_masks[i][:, :, :, : plan.n_keys], pattern.make_mask(plan, own_masks[i].dtype)
            ):
                shape = "window" if pattern.window else "chunk"
                raise ModelError(
                    f"layer {i} has a mask that is not a {shape} of {span} where that begins"
                )


def hidden_arg(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among a layer's arguments, [B, T, H]."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def replace_hidden(layer_args: LayerArgs, h: Tensor) -> LayerArgs:
    """Return the arguments of a layer with other hidden states."""
    args, kwargs = layer_args
    return ((h, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": h})


def bind_arguments(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return positional and keyword arguments by name."""
    return dict(zip(names, args, strict=False)) | kwargs
