"""Split a Hugging Face model into embedding, residual sub-layers and head.

The row of its family in the table names the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.errors import ModelError
from skipsearch.models.families.table import Family, ModulePath

ModuleFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SubLayer:
    """A residual branch: sum_norm(h + scale · post_norm(run(norm(x)))), where x is h unless the
    residual is parallel.
    """

    run: ModuleFunction  # the attention or the MLP itself
    norm: ModuleFunction | None
    post_norm: ModuleFunction | None  # of the branch, before it is added
    sum_norm: ModuleFunction | None  # of the sum
    scale: float | None  # of the branch

    def apply_norm(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def add_branch(self, h: Tensor, branch: Any) -> Tensor:
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
    """An attention and an MLP sub-layer."""

    attn: SubLayer
    mlp: SubLayer
    parallel: bool  # attention and MLP read the same hidden state
    shares_norm: bool  # attention and MLP read the output of the attention's norm
    device: torch.device | None  # None if the whole model is on one device

    def __call__(self, h: Tensor, attention_args: Mapping[str, Any] | None, mlp: bool) -> Tensor:
        """Run the layer: [B, T, H] -> [B, T, H].

        attention_args: arguments of the attention besides hidden states; None: skip the attention.
        """
        if self.shares_norm:
            x = self.attn.apply_norm(h)
            if attention_args is not None:
                h = self.attn.add_branch(h, self.attn.run(x, **attention_args))
            return self.mlp.add_branch(h, self.mlp.run(x)) if mlp else h
        x = h
        if attention_args is not None:
            h = self.attn.add_branch(h, self.attn.run(self.attn.apply_norm(h), **attention_args))
        if mlp:
            h = self.mlp.add_branch(h, self.mlp.run(self.mlp.apply_norm(x if self.parallel else h)))
        return h


@dataclass(frozen=True)
class LayerKind:
    """The properties of a layer that determine the arguments of its attention.

    Layers of one kind share these arguments.
    """

    window: int | None  # tokens that it attends to; None: all
    layer_type: str | None  # selects the rotary table; None: there is one for all layers
    device: torch.device


@dataclass(frozen=True)
class Multiplication:
    """A step that multiplies by a number."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


@dataclass(frozen=True)
class Division:
    """A step that divides by a number."""

    divisor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x / self.divisor


@dataclass(frozen=True)
class SoftCap:
    """A step that bends logits so that none is beyond ±cap."""

    cap: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.cap) * self.cap


@dataclass(frozen=True)
class ModelParts:
    """The parts of a model in the order of a pass."""

    embed_steps: list[ModuleFunction]  # from token ids to hidden states, without learned positions
    positions: ModuleFunction | None  # learned position embeddings
    rotary: ModuleFunction | None
    layers: list[Layer]
    kinds: list[LayerKind]  # of each layer
    head_steps: list[ModuleFunction]  # from hidden states to logits; the first is the final norm


def decompose_model(model: nn.Module, family: Family) -> ModelParts:
    """Split a model. Raises: ModelError if it lacks a module that its family's row names."""
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    try:
        modules = list(attrgetter(family.layers)(model))
        devices = [next(layer.parameters()).device for layer in modules]
        is_spread = len(set(devices)) > 1
        layers = [
            _make_layer(module, family, config, device if is_spread else None)
            for module, device in zip(modules, devices, strict=True)
        ]
        embed_steps = [
            _find_module(family.embed, model),
            _make_multiply(config, family.embed_scale_key),
            _find_module(family.embed_project, model),
        ]
        head_steps = [
            _find_module(family.norm, model),
            _find_module(family.head_project, model),
            _find_module(family.head, model),
            _make_multiply(config, family.logit_scale_key),
            _make_divide(config, family.logit_divisor_key),
            _make_softcap(config, family.logit_cap_key),
        ]
        positions = _find_module(family.positions, model)
        rotary = _find_module(family.rotary, model)
    except AttributeError as error:
        raise ModelError(
            f"this {config.model_type} model cannot be taken apart ({error}): give the "
            "AutoModelForCausalLM itself, not a wrapper around it and not its base model"
        ) from None
    if len(layers) != config.num_hidden_layers:
        raise ModelError(
            f"this {config.model_type} model has {len(layers)} layers and its config says "
            f"{config.num_hidden_layers}: set config.num_hidden_layers to what it has"
        )
    kinds = [
        LayerKind(
            _layer_window(family, config, i),
            _layer_type(config, i) if family.rotary_takes_type else None,
            device,
        )
        for i, device in enumerate(devices)
    ]
    embed_steps = [step for step in embed_steps if step]
    head_steps = [step for step in head_steps if step]
    if is_spread:
        embed_steps = [_make_device_mover(step) for step in embed_steps]
        head_steps = [_make_device_mover(step) for step in head_steps]
        head_steps.append(lambda logits: logits.to(devices[0]))  # the device of the tokens
    return ModelParts(embed_steps, positions, rotary, layers, kinds, head_steps)


def _find_module(path: ModulePath | None, root: nn.Module) -> Any:
    if path is None:
        return None
    return attrgetter(path)(root) if isinstance(path, str) else path(root)


def _make_layer(
    module: nn.Module, family: Family, config: Any, device: torch.device | None
) -> Layer:
    scale = _config_value(config, family.branch_scale_key)

    def make_sublayer(kind: str) -> SubLayer:
        run, norm, post_norm, sum_norm = (
            _find_module(getattr(family, kind + suffix), module)
            for suffix in ("", "_norm", "_post_norm", "_sum_norm")
        )
        return SubLayer(run, norm, post_norm, sum_norm, scale)

    shares_norm = family.parallel and family.attn_norm == family.mlp_norm
    return Layer(make_sublayer("attn"), make_sublayer("mlp"), family.parallel, shares_norm, device)


def _layer_type(config: Any, i: int) -> str | None:
    types = getattr(config, "layer_types", None)
    return types[i] if types else None


def _layer_window(family: Family, config: Any, i: int) -> int | None:
    if family.window_layers == "none" or (
        family.window_layers == "typed" and _layer_type(config, i) != "sliding_attention"
    ):
        return None
    return _config_value(config, "sliding_window")


def _config_value(config: Any, key: str | None) -> Any:
    return None if key is None else getattr(config, key, None)


def _make_multiply(config: Any, key: str | None) -> ModuleFunction | None:
    factor = _config_value(config, key)
    return None if factor is None else Multiplication(factor)


def _make_divide(config: Any, key: str | None) -> ModuleFunction | None:
    divisor = _config_value(config, key)
    return None if divisor is None else Division(divisor)


def _make_softcap(config: Any, key: str | None) -> ModuleFunction | None:
    cap = _config_value(config, key)
    return None if cap is None else SoftCap(cap)


def _make_device_mover(step: ModuleFunction) -> ModuleFunction:
    """Return a function that moves its input to the device of `step`, then runs it."""
    if not isinstance(step, nn.Module):
        return step
    device = next(step.parameters()).device
    return lambda x: step(x.to(device))
