"""The tensors of a module: written, read, and put into the model that drafts with them. What does not fit is refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from skipsearch.engine.variants import underneath, with_weights
from skipsearch.errors import ModelError, ModuleError
from skipsearch.fields import ModuleRef
from skipsearch.machine import write_whole
from skipsearch.models import variants
from skipsearch.models.spec import ModelAdapter, ModelSpec
from skipsearch.modules.card import Base, Card
from skipsearch.modules.files import CARD, MOST_BYTES, WAY_OUT, find, read_header

DOWN, UP = ":down", ":up"   # the two factors of a low-rank change, behind the name of the weight that they change


def save_module(path: Path, card: Card, tensors: Mapping[str, Tensor]) -> None:
    """Write a module; a reader sees the old file or the whole new one. Raises: ModuleError."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in stored.values())
    if size > MOST_BYTES - 2**22:
        raise ModuleError(f"this module would have {size / 2**30:.1f} GiB, and a file may have {MOST_BYTES / 2**30:.0f}: keep fewer "
                          "sub-layers, or train --rank N instead of whole copies")
    try:
        write_whole(path, save(stored, {CARD: card.model_dump_json()}))
        path.chmod(0o644)   # for others to use
    except OSError as error:
        raise ModuleError(f"cannot write {path}: {error.strerror or error}; choose another --out") from None


def load_tensors(path: Path) -> tuple[Card, dict[str, Tensor]]:
    """Raises: ModuleError for a file that is no whole module, or holds what is no number."""
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in header.shapes}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModuleError(f"{path}: it cannot be read ({str(error).splitlines()[0][:120]}); {WAY_OUT}") from None
    broken = next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)
    if broken is not None:
        raise ModuleError(f"{path}: {broken} holds values that are not numbers (NaN or infinite), so its training went wrong; {WAY_OUT}")
    return header.card, tensors


def found_tensors(ref: ModuleRef, folders: Sequence[Path]) -> tuple[Card, dict[str, Tensor], str]:
    """The card and the tensors of the file that a profile names, and its path, for errors. Raises: ModuleError."""
    path = find(ref, folders)
    return *load_tensors(path), str(path)


def drafting_model(model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]) -> ModelAdapter:
    """The model with the trained weights of a module in the sub-layers that they are for; the model itself stays as it is.

    Raises: ModuleError for a file that is missing, damaged, of another kind, or made for another model.
    """
    card, tensors, name = found_tensors(ref, folders)
    check_card(card, "adapted", model.spec, name)
    return adapted(model, card, tensors, name)


def adapted(model: ModelAdapter, card: Card, tensors: Mapping[str, Tensor], name: str) -> ModelAdapter:
    """As `drafting_model`, of tensors that are read already. name: the file's, for errors."""
    check_base(card.base, model.spec, name)
    try:
        given = whole_weights(model, tensors)
        wanted = {f"{i}.{kind}" for i, kind in variants.kept(card.mask)}
        if (found := {".".join(key.split(".")[:2]) for key in given}) != wanted:
            odd = sorted(found ^ wanted)[0]
            raise ModelError(f"its mask and its tensors disagree about sub-layer {odd}")
        return with_weights(model, given)
    except (ModelError, ValueError) as error:
        raise ModuleError(f"{name}: this module does not fit {model.spec.id}: {error}; train one for this model") from None


def whole_weights(model: ModelAdapter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every weight of each sub-layer that a module names: its copies as they are, low-rank changes added to the model's own.

    Raises: ModelError for tensors that no weight of the model has room for.
    """
    base = underneath(model)
    names = {name.removesuffix(DOWN).removesuffix(UP) for name in tensors}
    whole: dict[str, Tensor] = {}
    for i, kind in sorted({_sublayer(name) for name in names}):
        mine = {name for name in names if name.startswith(f"{i}.{kind}.")}
        if not 0 <= i < model.spec.n_layers or kind not in variants.KINDS:
            raise ModelError(f"{model.spec.id} has no sub-layer {i}.{kind}")
        if mine <= tensors.keys():   # copies
            whole |= {name: tensors[name] for name in mine}
            continue
        own = variants.weights_of(base, i, kind, mine)
        for name, weight in own.items():
            if name in tensors:
                own[name] = tensors[name]
            elif name + DOWN in tensors and name + UP in tensors:
                own[name] = merged(weight, tensors[name + DOWN], tensors[name + UP], name)
            elif name in mine:
                raise ModelError(f"one factor of the low-rank change of {name} is missing")
        if odd := mine - own.keys():
            raise ModelError(f"there is no weight {sorted(odd)[0]}")
        whole |= own
    return whole


def merged(weight: Tensor, down: Tensor, up: Tensor, name: str) -> Tensor:
    """weight + up · down, [out, in], summed in float32 or better."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if (up.shape[0], down.shape[-1]) != tuple(weight.shape) or up.shape[-1] != down.shape[0]:
        raise ModelError(f"{name} is {tuple(weight.shape)} and its low-rank change {tuple(up.shape)} by {tuple(down.shape)}")
    return (weight.to(wide) + up.to(weight.device, wide) @ down.to(weight.device, wide)).to(weight.dtype)


def base_of(spec: ModelSpec) -> Base:
    return Base(id=spec.id, family=spec.family, n_layers=spec.n_layers, weights_sha256=spec.weights_sha256)


def check_card(card: Card, kind: str, spec: ModelSpec, name: str) -> None:
    """Raises: ModuleError for a module of another kind, or of another model."""
    check_base(card.base, spec, name)
    if card.kind != kind:
        raise ModuleError(f"{name}: this module is of the kind {card.kind}, not {kind}")


def check_base(base: Base, spec: ModelSpec, name: str) -> None:
    """Raises: ModuleError for a module of another model, as far as both say what they are."""
    wrong = None
    if (base.family, base.n_layers) != (spec.family, spec.n_layers):
        wrong = f"is a {base.family} of {base.n_layers} layers, and {spec.id} a {spec.family} of {spec.n_layers}"
    elif None not in (base.weights_sha256, spec.weights_sha256) and base.weights_sha256 != spec.weights_sha256:
        wrong = (f"has other weights (hash {str(base.weights_sha256)[:12]}…) than {spec.id} here "
                 f"({str(spec.weights_sha256)[:12]}…)")
    if wrong:
        raise ModuleError(f"{name}: this module was trained for {base.id}, which {wrong}; train one for this model")


def _sublayer(name: str) -> tuple[int, str]:
    i, kind, _ = name.split(".", 2)
    return int(i), kind
