"""The same model with other weights in some of its sub-layers; everything else is shared, and the model itself stays as it is.

Weights go by the names that Hugging Face's modules give them, whatever drives the model: `3.attn.run.q_proj.weight` is that of layer 3's
attention module, `3.attn.norm.weight` of the norm before it, `5.mlp.post_norm.weight` of one behind an MLP.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skipsearch.errors import ModelError
from skipsearch.mask import SkipMask
from skipsearch.models.hf import HFAdapter
from skipsearch.models.layout import Layer, SubLayer
from skipsearch.models.lean import MLP, Attention, LeanAdapter
from skipsearch.models.norms import Norm

KINDS = ("attn", "mlp")
PARTS = ("run", "norm", "post_norm", "sum_norm")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def kept(mask: SkipMask) -> list[tuple[int, str]]:
    """(layer, kind) of what a mask leaves in."""
    return [(s // 2, KINDS[s % 2]) for s in range(2 * mask.n_layers) if s not in mask.sublayers]


def weights_of(model: HFAdapter | LeanAdapter, i: int, kind: str, like: Iterable[str] = ()) -> dict[str, Tensor]:
    """All weights of a sub-layer by name, as the model has them. like: names to follow where a family may store several matrices as one.

    Raises: ModelError for a sub-layer that is no module of its own, or is quantised.
    """
    found = dict(_hf_weights(model, i, kind) if isinstance(model, HFAdapter) else _lean_weights(model, i, kind, set(like)))
    if not found or not all(weight.is_floating_point() for weight in found.values()):
        why = "are quantised" if found else "stand in no module of their own"
        raise ModelError(f"the weights of {'attention' if kind == 'attn' else 'MLP'} {i} of {model.spec.id} {why}, so a draft can have "
                         "no copy of them")
    return found


def with_copies(model: HFAdapter, sublayers: Iterable[tuple[int, str]]) -> HFAdapter:
    """The model with copies of these sub-layers in their places, which may then be trained."""
    variant = copy.copy(model)
    layers = list(model._layers)
    for i, kind in sublayers:
        copies = {part: copy.deepcopy(module) for part, module in _modules(layers[i], kind)}
        layers[i] = replace(layers[i], **{kind: replace(getattr(layers[i], kind), **copies)})
    variant._layers = layers
    return variant


def with_weights(model: HFAdapter | LeanAdapter, weights: Mapping[str, Tensor]) -> HFAdapter | LeanAdapter:
    """The model with these weights, all those of each sub-layer that is named. Raises: ModelError if names or shapes are not its own."""
    sublayers: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        layer, kind, _ = name.split(".", 2)
        sublayers.setdefault((int(layer), kind), {})[name] = weight
    for (i, kind), given in sublayers.items():
        if not 0 <= i < depth(model) or kind not in KINDS:
            raise ModelError(f"{model.spec.id} has no sub-layer {i}.{kind}")
        there = {name: tuple(weight.shape) for name, weight in weights_of(model, i, kind, given).items()}
        wrong = next((name for name in sorted(there.keys() | given.keys())
                      if name not in given or tuple(given[name].shape) != there.get(name)), None)
        if wrong is not None:
            has = tuple(given[wrong].shape) if wrong in given else "left out"
            raise ModelError(f"{wrong} is {there.get(wrong, 'nothing')} in {model.spec.id} and {has} here")
    placed = {name: weight.detach().to(model.spec.dtype) for name, weight in weights.items()}
    return _lean_variant(model, sublayers, placed) if isinstance(model, LeanAdapter) else _hf_variant(model, sublayers, placed)


def depth(model: HFAdapter | LeanAdapter) -> int:
    """Layers, one that was added behind them included."""
    return len(model.layers if isinstance(model, LeanAdapter) else model._layers)


def with_layer(model: HFAdapter | LeanAdapter, template: int) -> HFAdapter | LeanAdapter:
    """The model with one layer more behind its own, a copy of layer `template` with a K/V buffer of its own: block `n_layers`.

    Its final norm is a copy too, so that either may be given other weights. Raises: ModelError for a family whose layers cannot be copied.
    """
    variant: Any = copy.copy(model)
    if isinstance(model, LeanAdapter):
        attention, mlp = model.layers[template]
        variant.layers = [*model.layers, (replace(attention, index=len(model.layers)), mlp)]
        fused: LeanAdapter = variant
        return fused
    parts, layer = model._parts, model._layers[template]
    norm, run = parts.after[0], copy.deepcopy(layer.attn.run)
    if not isinstance(norm, nn.Module) or not hasattr(run, "layer_idx"):
        raise ModelError(f"a layer of {model.spec.family} cannot be copied behind the others: its attention does not say which layer it is")
    run.layer_idx = len(model._layers)
    variant._layers = [*model._layers, replace(layer, attn=replace(layer.attn, run=run))]
    variant._kind_of = [*model._kind_of, model._kind_of[template]]
    variant._parts = replace(parts, after=[copy.deepcopy(norm), *parts.after[1:]])
    return with_copies(variant, [(len(model._layers), kind) for kind in KINDS])


def final_norm(model: HFAdapter | LeanAdapter) -> dict[str, Tensor]:
    """The weights of the norm before the head, by name: `norm.weight` and, where there is one, `norm.bias`."""
    if isinstance(model, LeanAdapter):
        return {"norm.weight": _stored(model.norm)}
    return {f"norm.{name}": parameter for name, parameter in model._parts.after[0].named_parameters()}  # type: ignore[attr-defined]


def with_final_norm(model: HFAdapter | LeanAdapter, weights: Mapping[str, Tensor]) -> HFAdapter | LeanAdapter:
    """The model of `with_layer` with another norm before its head. Raises: ModelError if names or shapes are not its own."""
    own = final_norm(model)
    if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
        raise ModelError("the norm before the head has other weights than these")
    given = {name: weight.detach().to(own[name]) for name, weight in weights.items()}
    if isinstance(model, LeanAdapter):
        variant = copy.copy(model)
        weight = given["norm.weight"]
        variant.norm = replace(model.norm, weight=1 + weight if model.norm.wide else weight)
        return variant
    for name, parameter in final_norm(model).items():
        parameter.data = given[name]
        parameter.requires_grad_(False)
    return model


def _hf_variant(model: HFAdapter, sublayers: Iterable[tuple[int, str]], weights: Mapping[str, Tensor]) -> HFAdapter:
    variant = with_copies(model, sublayers)
    for i, kind in sublayers:
        for name, parameter in _hf_weights(variant, i, kind):
            parameter.data = weights[name].to(device=parameter.device, dtype=parameter.dtype)
            parameter.requires_grad_(False)
    return variant


def _hf_weights(model: HFAdapter, i: int, kind: str) -> Iterator[tuple[str, Any]]:
    for part, module in _modules(model._layers[i], kind):
        yield from ((f"{i}.{kind}.{part}.{name}", parameter) for name, parameter in module.named_parameters())


def modules_of(model: HFAdapter, i: int, kind: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a sub-layer, by their part in its name."""
    return _modules(model._layers[i], kind)


def _modules(layer: Layer, kind: str) -> Iterator[tuple[str, nn.Module]]:
    sublayer: SubLayer = getattr(layer, kind)
    for part in PARTS:
        module = getattr(sublayer, part)
        if isinstance(module, nn.Module) and not (layer.one_norm and (kind, part) == ("mlp", "norm")):   # the attention's is used for both
            yield part, module


def _lean_weights(model: LeanAdapter, i: int, kind: str, like: set[str]) -> Iterator[tuple[str, Tensor]]:
    part: Any = model.layers[i][KINDS.index(kind)]
    for field in ("norm", "post_norm", "q_norm", "k_norm"):
        norm: Norm | None = getattr(part, field, None)
        if norm is not None:
            yield f"{i}.{kind}.{'run.' if field in ('q_norm', 'k_norm') else ''}{field}.weight", _stored(norm)
    for fused, names, last, sizes in _matrices(part):
        one = f"{i}.{kind}.run.{fused}.weight" in like
        for what, whole in (("weight", getattr(part, last).dense()), ("bias", getattr(part, last).bias)):
            if whole is not None:
                if last == "qkv" and part.order is not None:
                    whole = whole[part.order.argsort()]
                pieces = {fused: whole} if one else dict(zip(names, whole.split(sizes), strict=True))
                yield from ((f"{i}.{kind}.run.{name}.{what}", piece) for name, piece in pieces.items())


def _matrices(part: Attention | MLP) -> list[tuple[str, tuple[str, ...], str, list[int]]]:
    """(name of all as one, names one by one, our field, rows of each) of a sub-layer's matrices."""
    if isinstance(part, Attention):
        rows = [n * part.head_dim for n in (part.heads, part.kv_heads, part.kv_heads)]
        return [("qkv_proj", QKV, "qkv", rows), ("o_proj", ("o_proj",), "out", [part.out.shape[0]])]
    return [("gate_up_proj", GATE_UP, "gate_up", [part.gate_up.shape[0] // 2] * 2),
            ("down_proj", ("down_proj",), "down", [part.down.shape[0]])]


def _stored(norm: Norm) -> Tensor:
    """A norm's weight as its module has it: Gemma's scale by 1 + weight."""
    return norm.weight - 1 if norm.wide else norm.weight


def _lean_variant(model: LeanAdapter, sublayers: Iterable[tuple[int, str]], weights: Mapping[str, Tensor]) -> LeanAdapter:
    variant = copy.copy(model)   # with the angles and masks of the model itself
    layers: list[tuple[Any, Any]] = list(model.layers)
    for i, kind in sublayers:
        at = KINDS.index(kind)
        pair = list(layers[i])
        pair[at] = _lean_part(pair[at], f"{i}.{kind}.", weights, model.spec.device)
        layers[i] = (pair[0], pair[1])
    variant.layers = layers
    return variant


def _lean_part(part: Any, prefix: str, weights: Mapping[str, Tensor], device: torch.device) -> Any:
    def given(name: str) -> Tensor | None:
        found = weights.get(prefix + name)
        return None if found is None else found.to(device)

    def norm(field: str, name: str) -> Norm | None:
        old: Norm | None = getattr(part, field, None)
        weight = given(name)
        if old is None or weight is None:
            return old
        return replace(old, weight=1 + weight.to(old.weight.dtype) if old.wide else weight)

    fields: dict[str, Any] = {field: norm(field, f"{field}.weight") for field in ("norm", "post_norm")}
    if isinstance(part, Attention):
        fields |= {field: norm(field, f"run.{field}.weight") for field in ("q_norm", "k_norm")}
    for fused, names, field, _ in _matrices(part):
        names = (fused,) if prefix + f"run.{fused}.weight" in weights else names
        rows = [weights[f"{prefix}run.{name}.weight"].to(device) for name in names]
        biases = [given(f"run.{name}.bias") for name in names]
        weight, bias = torch.cat(rows), torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        if field == "qkv" and part.order is not None:
            weight, bias = weight[part.order], None if bias is None else bias[part.order]
        fields[field] = getattr(part, field).like(weight, bias)
    return replace(part, **fields)
