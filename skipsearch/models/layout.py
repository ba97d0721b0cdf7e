"""A Hugging Face model taken apart by its row of the families table: layers as residual sub-layers, and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.errors import ModelError
from skipsearch.models.families import Family, Part

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SubLayer:
    """A residual branch: sum_norm(h + scale · post_norm(run(norm(x)))), where x is h itself unless the residual is parallel."""

    run: Function
    norm: Function | None
    post_norm: Function | None
    sum_norm: Function | None
    scale: float | None

    def normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def added(self, h: Tensor, branch: Any) -> Tensor:
        if isinstance(branch, tuple):
            branch = branch[0]
        if self.post_norm is not None:
            branch = self.post_norm(branch)
        if self.scale is not None:
            branch = branch * self.scale
        h = h + branch
        return h if self.sum_norm is None else self.sum_norm(h)


@dataclass(frozen=True, slots=True)
class Layer:
    """device: where it is, if the model is spread over several; None if it is not."""

    attn: SubLayer
    mlp: SubLayer
    parallel: bool
    one_norm: bool
    device: torch.device | None

    def __call__(self, h: Tensor, inputs: Mapping[str, Any] | None, mlp: bool) -> Tensor:
        """[B, T, H] -> [B, T, H]. inputs: the attention's arguments beside its hidden states, or None to leave it out."""
        if self.one_norm:
            x = self.attn.normed(h)
            if inputs is not None:
                h = self.attn.added(h, self.attn.run(x, **inputs))
            return self.mlp.added(h, self.mlp.run(x)) if mlp else h
        x = h
        if inputs is not None:
            h = self.attn.added(h, self.attn.run(self.attn.normed(h), **inputs))
        if mlp:
            h = self.mlp.added(h, self.mlp.run(self.mlp.normed(x if self.parallel else h)))
        return h


@dataclass(frozen=True)
class LayerKind:
    """What decides the attention's arguments, so that layers of one kind share them. window: tokens it sees, None for all."""

    window: int | None
    layer_type: str | None
    device: torch.device


@dataclass(frozen=True)
class Layout:
    """before: from token ids to hidden states, less learned positions; after: from hidden states to logits; one by one."""

    before: list[Function]
    positions: Function | None
    rotary: Function | None
    layers: list[Layer]
    kinds: list[LayerKind]       # of each layer
    after: list[Function]


def take_apart(model: nn.Module, family: Family) -> Layout:
    """Raises: ModelError if the model lacks a piece that its family's row names."""
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    try:
        modules = list(attrgetter(family.layers)(model))
        devices = [next(layer.parameters()).device for layer in modules]
        spread = len(set(devices)) > 1
        layers = [_layer(module, family, config, device if spread else None)
                  for module, device in zip(modules, devices, strict=True)]
        before = [_find(family.embed, model), _times(config, family.embed_scale_key), _find(family.embed_project, model)]
        after = [_find(family.norm, model), _find(family.head_project, model), _find(family.head, model),
                 _times(config, family.logit_scale_key), _over(config, family.logit_divisor_key),
                 _capped(config, family.logit_cap_key)]
        positions, rotary = _find(family.positions, model), _find(family.rotary, model)
    except AttributeError as error:
        raise ModelError(f"this {config.model_type} model cannot be taken apart ({error}): give the AutoModelForCausalLM itself, "
                         "not a wrapper around it and not its base model") from None
    if len(layers) != config.num_hidden_layers:
        raise ModelError(f"this {config.model_type} model has {len(layers)} layers and its config says "
                         f"{config.num_hidden_layers}: set config.num_hidden_layers to what it has")
    kinds = [LayerKind(_window(family, config, i), _layer_type(config, i) if family.rotary_by_type else None, device)
             for i, device in enumerate(devices)]
    if spread:  # every piece fetches its input, and the logits go back to where the tokens came from
        before, after = ([_fetching(piece) for piece in pieces] for pieces in (before, after))
        after.append(lambda logits: logits.to(devices[0]))
    return Layout([f for f in before if f], positions, rotary, layers, kinds, [f for f in after if f])


def _find(part: Part | None, root: nn.Module) -> Any:
    if part is None:
        return None
    return attrgetter(part)(root) if isinstance(part, str) else part(root)


def _layer(module: nn.Module, family: Family, config: Any, device: torch.device | None) -> Layer:
    scale = _value(config, family.branch_scale_key)

    def sublayer(kind: str) -> SubLayer:
        def piece(suffix: str) -> Any:
            return _find(getattr(family, kind + suffix), module)

        return SubLayer(piece(""), piece("_norm"), piece("_post_norm"), piece("_sum_norm"), scale)

    one_norm = family.parallel and family.attn_norm == family.mlp_norm
    return Layer(sublayer("attn"), sublayer("mlp"), family.parallel, one_norm, device)


def _layer_type(config: Any, i: int) -> str | None:
    types = getattr(config, "layer_types", None)
    return types[i] if types else None


def _window(family: Family, config: Any, i: int) -> int | None:
    if family.window == "none" or (family.window == "typed" and _layer_type(config, i) != "sliding_attention"):
        return None
    return _value(config, "sliding_window")


def _value(config: Any, key: str | None) -> Any:
    return None if key is None else getattr(config, key, None)


def _times(config: Any, key: str | None) -> Function | None:
    factor = _value(config, key)
    return None if factor is None else lambda x: x * factor


def _over(config: Any, key: str | None) -> Function | None:
    divisor = _value(config, key)
    return None if divisor is None else lambda x: x / divisor


def _capped(config: Any, key: str | None) -> Function | None:
    cap = _value(config, key)
    return None if cap is None else lambda x: torch.tanh(x / cap) * cap


def _fetching(piece: Function | None) -> Function | None:
    if not isinstance(piece, nn.Module):
        return piece
    device = next(piece.parameters()).device
    return lambda x: piece(x.to(device))
