"""Write and read the tensors of a module, and build the model that drafts with them.

Tensors that do not fit the model raise an error of one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from skipsearch.core.files import write_atomically
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.trained.card import (
    BLOCK_BYTES,
    BLOCK_VALUES,
    BlockFormat,
    ModuleCard,
    TrainedFor,
)
from skipsearch.drafters.trained.module_files import (
    CARD_KEY,
    MAX_FILE_BYTES,
    WAY_OUT,
    find_module_file,
    read_module_header,
)
from skipsearch.engine.on_same_engine import base_adapter, overlay_weights
from skipsearch.errors import ModelError, ModuleError
from skipsearch.models import weight_overlay
from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.models.loading.gguf_file import to_float32
from skipsearch.models.loading.quantize import split_kv_cache_dtype

# Suffixes of the two factors of a low-rank update, after the name of the weight.
DOWN_SUFFIX, UP_SUFFIX = ":down", ":up"


def save_module(path: Path, card: ModuleCard, tensors: Mapping[str, Tensor]) -> None:
    """Write a module atomically. Raises: ModuleError."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in stored.values())
    if size > MAX_FILE_BYTES - 2**22:
        raise ModuleError(
            f"this module would have {size / 2**30:.1f} GiB, and a file may have "
            f"{MAX_FILE_BYTES / 2**30:.0f}: keep fewer "
            "sub-layers, or train --rank N instead of whole copies"
        )
    try:
        write_atomically(path, save(stored, {CARD_KEY: card.model_dump_json()}), private=False)
    except OSError as error:
        raise ModuleError(
            f"cannot write {path}: {error.strerror or error}; choose another --out"
        ) from None


def load_module(path: Path) -> tuple[ModuleCard, dict[str, Tensor]]:
    """Return a module's card and tensors.

    Raises: ModuleError if the file is not a complete module, or has values that are not finite."""
    header = read_module_header(path)
    try:
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in header.shapes}
        tensors = unpack_matrices(tensors, header.card.blocks)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModuleError(
            f"{path}: it cannot be read ({str(error).splitlines()[0][:120]}); {WAY_OUT}"
        ) from None
    broken = next(
        (name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None
    )
    if broken is not None:
        raise ModuleError(
            f"{path}: {broken} holds values that are not numbers (NaN or infinite), so its "
            f"training went wrong; {WAY_OUT}"
        )
    return header.card, tensors


def pack_matrices(tensors: Mapping[str, Tensor], blocks: BlockFormat) -> dict[str, Tensor]:
    """Return tensors as a module stores them: matrices in blocks, if their rows are whole blocks.

    A matrix [out, in] becomes bytes, [out, in / 32 · bytes of a block].
    """
    return {
        name: _pack(tensor, blocks)
        if tensor.ndim == 2 and not tensor.shape[1] % BLOCK_VALUES
        else tensor
        for name, tensor in tensors.items()
    }


def unpack_matrices(tensors: Mapping[str, Tensor], blocks: BlockFormat | None) -> dict[str, Tensor]:
    """Return the values of tensors that `pack_matrices` returned; matrices are float32."""
    if blocks is None:
        return dict(tensors)
    kind = blocks.lower()
    return {
        name: to_float32(
            tensor.numpy(),
            kind,
            (len(tensor), tensor.shape[1] // BLOCK_BYTES[blocks] * BLOCK_VALUES),
        )
        if tensor.dtype == torch.uint8
        else tensor
        for name, tensor in tensors.items()
    }


def _pack(matrix: Tensor, blocks: BlockFormat) -> Tensor:
    import gguf

    kind = gguf.GGMLQuantizationType[blocks]
    return torch.from_numpy(gguf.quants.quantize(matrix.detach().cpu().float().numpy(), kind))


def load_referenced(
    ref: ModuleRef, folders: Sequence[Path]
) -> tuple[ModuleCard, dict[str, Tensor], str]:
    """Return (card, tensors, path for errors) of the module file that a profile names.

    Raises: ModuleError.
    """
    path = find_module_file(ref, folders)
    return *load_module(path), str(path)


def load_drafting_model(
    model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]
) -> ModelAdapter:
    """Return the model with the trained weights of a module; the model itself does not change.

    Raises: ModuleError for a file that is missing, damaged, of another kind, or made for another
    model."""
    card, tensors, name = load_referenced(ref, folders)
    check_card(card, "adapted", model.spec, name)
    return apply_module(model, card, tensors, name)


def apply_module(
    model: ModelAdapter, card: ModuleCard, tensors: Mapping[str, Tensor], name: str
) -> ModelAdapter:
    """Return the model with the tensors of a module, which were read already.

    name: the file's name, for errors.
    """
    check_base(card.base, model.spec, name)
    try:
        weights = merge_low_rank(model, tensors)
        by_tensors = {".".join(key.split(".")[:2]) for key in weights}
        by_mask = {f"{i}.{kind}" for i, kind in weight_overlay.kept_sublayers(card.mask)}
        if by_tensors != by_mask:
            sublayer = min(by_tensors ^ by_mask)
            raise ModelError(f"its mask and its tensors disagree about sub-layer {sublayer}")
        return overlay_weights(model, weights)
    except (ModelError, ValueError) as error:
        raise ModuleError(
            f"{name}: this module does not fit {model.spec.id}: {error}; train one for this model"
        ) from None


def merge_low_rank(model: ModelAdapter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all weights of each sub-layer that a module names.

    Trained copies are returned unchanged; low-rank updates are added to the model's weights.
    Raises: ModelError for tensors that match no weight of the model.
    """
    base = base_adapter(model)
    names = {name.removesuffix(DOWN_SUFFIX).removesuffix(UP_SUFFIX) for name in tensors}
    merged: dict[str, Tensor] = {}
    for i, kind in sorted({_parse_sublayer(name) for name in names}):
        sublayer_names = {name for name in names if name.startswith(f"{i}.{kind}.")}
        if not 0 <= i < model.spec.n_layers or kind not in weight_overlay.SUBLAYER_KINDS:
            raise ModelError(f"{model.spec.id} has no sub-layer {i}.{kind}")
        if sublayer_names <= tensors.keys():  # copies
            merged |= {name: tensors[name] for name in sublayer_names}
            continue
        weights = weight_overlay.get_sublayer_weights(base, i, kind, sublayer_names)
        for name, weight in weights.items():
            if name in tensors:
                weights[name] = tensors[name]
            elif name + DOWN_SUFFIX in tensors and name + UP_SUFFIX in tensors:
                weights[name] = merge_one(
                    weight, tensors[name + DOWN_SUFFIX], tensors[name + UP_SUFFIX], name
                )
            elif name in sublayer_names:
                raise ModelError(f"one factor of the low-rank change of {name} is missing")
        if unknown := sublayer_names - weights.keys():
            raise ModelError(f"there is no weight {min(unknown)}")
        merged |= weights
    return merged


def merge_one(weight: Tensor, down: Tensor, up: Tensor, name: str) -> Tensor:
    """Return weight + up · down, [out, in], summed in float32 or a wider dtype.

    name: the weight's name, for errors. Raises: ModelError if the shapes do not match.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    if (up.shape[0], down.shape[-1]) != tuple(weight.shape) or up.shape[-1] != down.shape[0]:
        raise ModelError(
            f"{name} is {tuple(weight.shape)} and its low-rank change {tuple(up.shape)} by "
            f"{tuple(down.shape)}"
        )
    return (weight.to(wide) + up.to(weight.device, wide) @ down.to(weight.device, wide)).to(
        weight.dtype
    )


def make_base(spec: ModelSpec) -> TrainedFor:
    """Return the entry `base` of a card: the model that a module is trained for."""
    return TrainedFor(
        id=spec.id,
        family=spec.family,
        n_layers=spec.n_layers,
        weights_sha256=spec.weights_sha256,
        # Other engines unpack weights, and drafts trained there are used with any format.
        quantization=_without_kv_format(spec) if spec.engine == "native" else None,
    )


def _without_kv_format(spec: ModelSpec) -> str | None:
    """Return the format of weights and activations, which a module imitates."""
    quantization, _ = split_kv_cache_dtype(spec.quantization)
    return quantization


def check_card(card: ModuleCard, kind: str, spec: ModelSpec, name: str) -> None:
    """Raise ModuleError for a module of another kind, or of another model."""
    check_base(card.base, spec, name)
    if card.kind != kind:
        raise ModuleError(f"{name}: this module is of the kind {card.kind}, not {kind}")


def check_base(base: TrainedFor, spec: ModelSpec, name: str) -> None:
    """Raise ModuleError if a module is for another model.

    A model is another one if its family or depth differs, or if both name their weights by hash and
    the hashes differ. A module that was trained for a format of weights and a rounding of
    activations drafts for these alone, since it imitates their errors.
    """
    wrong = None
    if (base.family, base.n_layers) != (spec.family, spec.n_layers):
        wrong = (
            f"is a {base.family} of {base.n_layers} layers, and {spec.id} a {spec.family} of "
            f"{spec.n_layers}"
        )
    elif (
        None not in (base.weights_sha256, spec.weights_sha256)
        and base.weights_sha256 != spec.weights_sha256
    ):
        wrong = (
            f"has other weights (hash {str(base.weights_sha256)[:12]}…) than {spec.id} here "
            f"({str(spec.weights_sha256)[:12]}…)"
        )
    elif base.quantization not in (None, _without_kv_format(spec)):
        here = spec.quantization or spec.dtype_name
        wrong = f"ran as {base.quantization}, and runs as {here} here"
    if wrong:
        raise ModuleError(
            f"{name}: this module was trained for {base.id}, which {wrong}; train one for this "
            "model"
        )


def _parse_sublayer(name: str) -> tuple[int, str]:
    i, kind, _ = name.split(".", 2)
    return int(i), kind
