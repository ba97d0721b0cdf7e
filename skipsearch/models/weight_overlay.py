"""Make a variant of a model with other weights in some sub-layers.

All other weights are shared, and the model itself does not change. With every engine, weights have
the names of Hugging Face's modules: `3.attn.run.q_proj.weight` is in layer 3's attention module,
`3.attn.norm.weight` in the norm before it, and `5.mlp.post_norm.weight` in the norm after an
MLP.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.core.mask import SkipMask
from skipsearch.errors import ModelError
from skipsearch.models.families.decompose import Layer, SubLayer
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.fused.attention import Attention
from skipsearch.models.fused.fused_adapter import FusedAdapter
from skipsearch.models.fused.mlp import MLP
from skipsearch.models.fused.norms import RMSNorm

SUBLAYER_KINDS = ("attn", "mlp")
SUBLAYER_PARTS = ("run", "norm", "post_norm", "sum_norm")
QKV_NAMES, GATE_UP_NAMES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def kept_sublayers(mask: SkipMask) -> list[tuple[int, str]]:
    """Return (layer, kind) of each sub-layer that a mask does not skip."""
    return [
        (s // 2, SUBLAYER_KINDS[s % 2]) for s in range(2 * mask.n_layers) if s not in mask.sublayers
    ]


def get_sublayer_weights(
    model: HFAdapter | FusedAdapter, i: int, kind: str, naming_like: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Return all weights of a sub-layer by name.

    naming_like: decides the names if a family may store several matrices as one. Raises: ModelError
    if the sub-layer is not a separate module, or is quantised.
    """
    weights = dict(
        _iter_hf_weights(model, i, kind)
        if isinstance(model, HFAdapter)
        else _iter_fused_weights(model, i, kind, set(naming_like))
    )
    if not weights or not all(weight.is_floating_point() for weight in weights.values()):
        why = "are quantised" if weights else "stand in no module of their own"
        raise ModelError(
            f"the weights of {'attention' if kind == 'attn' else 'MLP'} {i} of {model.spec.id} "
            f"{why}, so a draft can have no copy of them"
        )
    return weights


def copy_sublayers(model: HFAdapter, sublayers: Iterable[tuple[int, str]]) -> HFAdapter:
    """Return a variant of the model with trainable copies of these sub-layers."""
    variant = copy.copy(model)
    layers = list(model._layers)
    for i, kind in sublayers:
        copies = {part: copy.deepcopy(module) for part, module in _iter_modules(layers[i], kind)}
        layers[i] = replace(layers[i], **{kind: replace(getattr(layers[i], kind), **copies)})
    variant._layers = layers
    return variant


def overlay_sublayer_weights(
    model: HFAdapter | FusedAdapter, weights: Mapping[str, Tensor]
) -> HFAdapter | FusedAdapter:
    """Return a variant with these weights, which must be complete for each sub-layer.

    Raises: ModelError if names or shapes differ from the model's own.
    """
    sublayers: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        layer, kind, _ = name.split(".", 2)
        sublayers.setdefault((int(layer), kind), {})[name] = weight
    for (i, kind), new_weights in sublayers.items():
        if not 0 <= i < count_layers(model) or kind not in SUBLAYER_KINDS:
            raise ModelError(f"{model.spec.id} has no sub-layer {i}.{kind}")
        own_weights = get_sublayer_weights(model, i, kind, new_weights)
        for name in sorted(own_weights.keys() | new_weights.keys()):
            shape, new_shape = _shape_of(own_weights, name), _shape_of(new_weights, name)
            if shape != new_shape:
                raise ModelError(
                    f"{name} is {'nothing' if shape is None else shape} in {model.spec.id} and "
                    f"{'left out' if new_shape is None else new_shape} here"
                )
    weights = {name: weight.detach().to(model.spec.dtype) for name, weight in weights.items()}
    return (
        _overlay_fused(model, sublayers, weights)
        if isinstance(model, FusedAdapter)
        else _overlay_hf(model, sublayers, weights)
    )


def _shape_of(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


def count_layers(model: HFAdapter | FusedAdapter) -> int:
    """Return the number of layers, including one that `append_layer` added."""
    return len(model.layers if isinstance(model, FusedAdapter) else model._layers)


def append_layer(model: HFAdapter | FusedAdapter, template: int) -> HFAdapter | FusedAdapter:
    """Return a variant with one more layer: block `n_layers`, a copy of layer `template`.

    The new layer has separate K/V buffers. The final norm is also copied, so that both may get
    other weights. Raises: ModelError if layers of this family cannot be copied.
    """
    variant: Any = copy.copy(model)
    if isinstance(model, FusedAdapter):
        attention, mlp = model.layers[template]
        variant.layers = [*model.layers, (replace(attention, index=len(model.layers)), mlp)]
        fused: FusedAdapter = variant
        return fused
    parts, layer = model._parts, model._layers[template]
    norm, run = parts.head_steps[0], copy.deepcopy(layer.attn.run)
    if not isinstance(norm, nn.Module) or not hasattr(run, "layer_idx"):
        raise ModelError(
            f"a layer of {model.spec.family} cannot be copied behind the others: its attention "
            "does not say which layer it is"
        )
    run.layer_idx = len(model._layers)
    variant._layers = [*model._layers, replace(layer, attn=replace(layer.attn, run=run))]
    variant._kind_indices = [*model._kind_indices, model._kind_indices[template]]
    variant._parts = replace(parts, head_steps=[copy.deepcopy(norm), *parts.head_steps[1:]])
    return copy_sublayers(variant, [(len(model._layers), kind) for kind in SUBLAYER_KINDS])


def get_final_norm(model: HFAdapter | FusedAdapter) -> dict[str, Tensor]:
    """Return the weights of the norm before the head: `norm.weight` and perhaps `norm.bias`."""
    if isinstance(model, FusedAdapter):
        return {"norm.weight": _hf_weight(model.norm)}
    return {
        f"norm.{name}": parameter
        for name, parameter in model._parts.head_steps[0].named_parameters()  # type: ignore[attr-defined]
    }


def overlay_final_norm(
    model: HFAdapter | FusedAdapter, weights: Mapping[str, Tensor]
) -> HFAdapter | FusedAdapter:
    """Return a model from `append_layer` with other weights in the norm before its head.

    Raises: ModelError if names or shapes differ from the norm's own.
    """
    own_weights = get_final_norm(model)
    if own_weights.keys() != weights.keys() or any(
        weight.shape != weights[name].shape for name, weight in own_weights.items()
    ):
        raise ModelError("the norm before the head has other weights than these")
    weights = {name: weight.detach().to(own_weights[name]) for name, weight in weights.items()}
    if isinstance(model, FusedAdapter):
        variant = copy.copy(model)
        variant.norm = _with_hf_weight(model.norm, weights["norm.weight"])
        return variant
    for name, parameter in own_weights.items():
        parameter.data = weights[name]
        parameter.requires_grad_(False)
    return model


def _overlay_hf(
    model: HFAdapter, sublayers: Iterable[tuple[int, str]], weights: Mapping[str, Tensor]
) -> HFAdapter:
    variant = copy_sublayers(model, sublayers)
    for i, kind in sublayers:
        for name, parameter in _iter_hf_weights(variant, i, kind):
            parameter.data = weights[name].to(device=parameter.device, dtype=parameter.dtype)
            parameter.requires_grad_(False)
    return variant


def _iter_hf_weights(model: HFAdapter, i: int, kind: str) -> Iterator[tuple[str, Any]]:
    for part, module in _iter_modules(model._layers[i], kind):
        yield from (
            (f"{i}.{kind}.{part}.{name}", parameter)
            for name, parameter in module.named_parameters()
        )


def iter_sublayer_modules(model: HFAdapter, i: int, kind: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (part of the name, module) of a sub-layer."""
    return _iter_modules(model._layers[i], kind)


def _iter_modules(layer: Layer, kind: str) -> Iterator[tuple[str, nn.Module]]:
    sublayer: SubLayer = getattr(layer, kind)
    for part in SUBLAYER_PARTS:
        module = getattr(sublayer, part)
        # A norm that both branches share belongs to the attention.
        shared = layer.shares_norm and (kind, part) == ("mlp", "norm")
        if isinstance(module, nn.Module) and not shared:
            yield part, module


def _iter_fused_weights(
    model: FusedAdapter, i: int, kind: str, naming_like: set[str]
) -> Iterator[tuple[str, Tensor]]:
    part: Any = model.layers[i][SUBLAYER_KINDS.index(kind)]
    if getattr(part, "routing", None) is not None:
        raise ModelError(
            f"MLP {i} of {model.spec.id} has experts, of which a draft has copies on the engine hf "
            "alone: use --engine hf"
        )
    for field in ("norm", "post_norm", "q_norm", "k_norm"):
        norm: RMSNorm | None = getattr(part, field, None)
        if norm is not None:
            yield (
                f"{i}.{kind}.{'run.' if field in ('q_norm', 'k_norm') else ''}{field}.weight",
                _hf_weight(norm),
            )
    for fused_name, names, field, sizes in _matrix_table(part):
        linear = getattr(part, field)
        is_stored_fused = f"{i}.{kind}.run.{fused_name}.weight" in naming_like
        for tensor_name, tensor in (("weight", linear.to_dense()), ("bias", linear.bias)):
            if tensor is None:
                continue
            if field == "qkv" and part.order is not None:
                tensor = tensor[part.order.argsort()]
            tensors = (
                {fused_name: tensor}
                if is_stored_fused
                else dict(zip(names, tensor.split(sizes), strict=True))
            )
            for name, tensor in tensors.items():
                yield f"{i}.{kind}.run.{name}.{tensor_name}", tensor


def _matrix_table(part: Attention | MLP) -> list[tuple[str, tuple[str, ...], str, list[int]]]:
    """Return (fused name, separate names, our field, their rows) of a sub-layer's matrices."""
    if isinstance(part, Attention):
        rows = [n * part.head_dim for n in (part.heads, part.kv_heads, part.kv_heads)]
        return [
            ("qkv_proj", QKV_NAMES, "qkv", rows),
            ("o_proj", ("o_proj",), "out", [part.out.shape[0]]),
        ]
    return [
        ("gate_up_proj", GATE_UP_NAMES, "gate_up", [part.gate_up.shape[0] // 2] * 2),
        ("down_proj", ("down_proj",), "down", [part.down.shape[0]]),
    ]


def _hf_weight(norm: RMSNorm) -> Tensor:
    """Return the weight as the module stores it. Gemma's norms scale by 1 + weight."""
    return norm.weight - 1 if norm.fp32 else norm.weight


def _with_hf_weight(norm: RMSNorm, weight: Tensor) -> RMSNorm:
    weight = weight.to(norm.weight.dtype)
    return replace(norm, weight=1 + weight if norm.fp32 else weight)


def _overlay_fused(
    model: FusedAdapter, sublayers: Iterable[tuple[int, str]], weights: Mapping[str, Tensor]
) -> FusedAdapter:
    variant = copy.copy(model)  # shares rotary tables and masks with the model
    variant.layers = list(model.layers)
    for i, kind in sublayers:
        attention, mlp = variant.layers[i]
        prefix, device = f"{i}.{kind}.", model.spec.device
        variant.layers[i] = (
            (_overlay_fused_part(attention, prefix, weights, device), mlp)
            if kind == "attn"
            else (attention, _overlay_fused_part(mlp, prefix, weights, device))
        )
    return variant


def _overlay_fused_part(
    part: Any, prefix: str, weights: Mapping[str, Tensor], device: torch.device
) -> Any:
    def get(name: str) -> Tensor | None:
        weight = weights.get(prefix + name)
        return None if weight is None else weight.to(device)

    fields: dict[str, Any] = {}
    for field in ("norm", "post_norm", "q_norm", "k_norm"):
        norm: RMSNorm | None = getattr(part, field, None)
        norm_weight = get(f"{'run.' if field in ('q_norm', 'k_norm') else ''}{field}.weight")
        if norm is not None and norm_weight is not None:
            fields[field] = _with_hf_weight(norm, norm_weight)
    for fused_name, names, field, _ in _matrix_table(part):
        names = (fused_name,) if f"{prefix}run.{fused_name}.weight" in weights else names
        weight = torch.cat([weights[f"{prefix}run.{name}.weight"].to(device) for name in names])
        biases = [bias for name in names if (bias := get(f"run.{name}.bias")) is not None]
        bias = torch.cat(biases) if biases else None
        if field == "qkv" and part.order is not None:
            weight, bias = weight[part.order], None if bias is None else bias[part.order]
        fields[field] = getattr(part, field).pack_like(weight, bias)
    return replace(part, **fields)
