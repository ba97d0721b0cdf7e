"""Modules for tiny models without any training: the kept sub-layers' own weights, moved a little at
random.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from helpers.tiny import LAYERS, tiny_model_and_reference, use_engine
from skipsearch.core.mask import SkipMask
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits.confidence import Confidence
from skipsearch.drafters.exits.exit_base import Exit
from skipsearch.drafters.exits.fixed import Fixed
from skipsearch.drafters.kangaroo.spec import Kangaroo
from skipsearch.drafters.kangaroo.weights import ADAPTER_PREFIX, SUBLAYERS_BY_FORM
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.s3d.spec import S3D
from skipsearch.drafters.s3d.weights import MASK_EMBEDDINGS
from skipsearch.drafters.trained.card import ModuleCard, TrainingRecord
from skipsearch.drafters.trained.module_files import make_reference
from skipsearch.drafters.trained.module_weights import make_base, save_module
from skipsearch.engine.on_same_engine import base_adapter
from skipsearch.models import ModelAdapter, weight_overlay
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.training.draft_head_student import DraftHeadStudent

SMALL_MASK = SkipMask(LAYERS, (1, 3), (0, 2))
TRAINED_CARD = TrainingRecord(
    text="a test's",
    licence="none",
    tokens=1,
    rows=1,
    steps=1,
    seconds=0.0,
    seed=0,
    device="cpu",
    dtype="float64",
    created="2026-01-01",
    before=0.5,
    after=0.5,
)


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="modules-")


def module_folder() -> Path:
    """Where the modules of this process lie; it goes with it."""
    return Path(_temporary_folder().name)


def make_card(model: ModelAdapter, mask: SkipMask, rank: int | None = None) -> ModuleCard:
    return ModuleCard(
        kind="adapted",
        base=make_base(model.spec),
        attn=mask.attn,
        mlp=mask.mlp,
        form="lora" if rank else "copy",
        rank=rank,
        trained=TRAINED_CARD,
    )


def noisy_copies(
    model: ModelAdapter, mask: SkipMask, noise: float, seed: int = 0
) -> dict[str, Tensor]:
    """Weights for each sub-layer that the mask keeps. noise: beside the size of the model's own."""
    random = torch.Generator().manual_seed(seed)
    own = {
        name: weight
        for i, kind in weight_overlay.kept_sublayers(mask)
        for name, weight in weight_overlay.get_sublayer_weights(
            base_adapter(model), i, kind
        ).items()
    }
    return {
        name: _add_noise(own[name], noise, random) for name in sorted(own)
    }  # in an order of their own, whatever engine has them


def noisy_low_rank_changes(
    model: ModelAdapter, mask: SkipMask, rank: int, noise: float, seed: int = 0
) -> dict[str, Tensor]:
    """Low-rank changes of every matrix that the mask keeps."""
    random, found = torch.Generator().manual_seed(seed), {}
    for name, weight in noisy_copies(model, mask, 0.0).items():
        if weight.ndim == 2:
            out, into = weight.shape
            found[f"{name}:down"] = (
                torch.randn(rank, into, generator=random, dtype=weight.dtype) * into**-0.5
            )
            found[f"{name}:up"] = noise * torch.randn(
                out, rank, generator=random, dtype=weight.dtype
            )
    return found


def save_adapted(
    model: ModelAdapter,
    mask: SkipMask,
    tensors: Mapping[str, Tensor],
    name: str,
    rank: int | None = None,
    draft_length: int = 4,
    exit_policy: Exit | None = None,
) -> Adapted:
    """The spec of a module, which lies in `folder` then."""
    save_module(module_folder() / name, make_card(model, mask, rank), tensors)
    return Adapted.from_module(
        mask, draft_length, exit_policy or Fixed(), make_reference(module_folder() / name, name)
    )


def _add_noise(weight: Tensor, noise: float, random: torch.Generator) -> Tensor:
    size = float(weight.std()) if weight.ndim > 1 else 1.0  # a norm's weights are all the same
    return weight + noise * size * torch.randn(
        weight.shape, generator=random, dtype=weight.dtype
    ).to(weight.device)


@cache
def small_module(
    noise: float = 0.1, draft_length: int = 12, mask: SkipMask = SMALL_MASK
) -> Adapted:
    """A module of `small_world`'s model."""
    with use_engine("hf"):
        model, _ = tiny_model_and_reference()
    return save_adapted(
        model,
        mask,
        noisy_copies(model, mask, noise),
        f"small-{noise:g}-{abs(hash(mask))}.safetensors",
        draft_length=draft_length,
    )


def make_untrained_adapter(
    model: ModelAdapter, exit_layer: int, form: str
) -> tuple[ModelAdapter, dict[str, Tensor]]:
    """Return (the model with a copy of its exit layer as adapter, weights of the copy).

    The weights are named as in a module file.
    """
    adapter = weight_overlay.append_layer(base_adapter(model), exit_layer)
    n = model.spec.n_layers
    weights = {
        ADAPTER_PREFIX + key.partition(".")[2]: weight
        for kind in SUBLAYERS_BY_FORM[form]
        for key, weight in weight_overlay.get_sublayer_weights(adapter, n, kind).items()
    }
    return adapter, weights | weight_overlay.get_final_norm(adapter)


def adapter_tensors(
    model: ModelAdapter, exit_layer: int, form: str, noise: float, seed: int = 0
) -> dict[str, Tensor]:
    """An adapter for kangaroo: a copy of the exit layer, moved a little at random."""
    random = torch.Generator().manual_seed(seed)
    own = make_untrained_adapter(model, exit_layer, form)[1]
    return {
        name: _add_noise(own[name], noise, random) for name in sorted(own)
    }  # in an order of their own, whatever engine has them


def make_early_exit_card(model: ModelAdapter, exit_layer: int, form: str) -> ModuleCard:
    above = tuple(range(exit_layer, model.spec.n_layers))
    return ModuleCard(
        kind="kangaroo",
        base=make_base(model.spec),
        attn=above,
        mlp=above,
        form=form,
        rank=None,
        exit_layer=exit_layer,  # type: ignore[arg-type]
        trained=TRAINED_CARD,
    )


def save_kangaroo(
    model: ModelAdapter,
    exit_layer: int,
    form: str,
    noise: float,
    name: str,
    draft_length: int = 4,
    exit_policy: Exit | None = None,
) -> Kangaroo:
    """The spec of an adapter, which lies in `folder` then."""
    save_module(
        module_folder() / name,
        make_early_exit_card(model, exit_layer, form),
        adapter_tensors(model, exit_layer, form, noise),
    )
    return Kangaroo(
        exit_layer=exit_layer,
        draft_length=draft_length,
        exit=exit_policy or Fixed(),
        module=make_reference(module_folder() / name, name),
    )


@cache
def small_kangaroo(
    form: str = "attention",
    noise: float = 0.1,
    draft_length: int = 12,
    threshold: float | None = None,
) -> Kangaroo:
    """An adapter of `small_world`'s model, behind its first two layers."""
    policy = None if threshold is None else Confidence(threshold=threshold)
    with use_engine("hf"):
        model, _ = tiny_model_and_reference()
    return save_kangaroo(
        model, 2, form, noise, f"kangaroo-{form}-{noise:g}.safetensors", draft_length, policy
    )


def save_mtp(
    model: ModelAdapter, name: str, noise: float = 0.1, draft_length: int = 4, seed: int = 0
) -> Mtp:
    """The spec of a draft head that was fitted to random text, and moved a little at random."""
    base = base_adapter(model)
    assert isinstance(base, HFAdapter)
    random = torch.Generator().manual_seed(seed)
    texts = torch.randint(model.spec.vocab_size, (32, 24), generator=random)
    student = DraftHeadStudent(base, texts)
    tensors = {
        key: _add_noise(parameter.detach().to(model.spec.dtype), noise, random)
        for key, parameter in sorted(student.parameters.items())
    }
    card = ModuleCard(**student.card, base=make_base(model.spec), trained=TRAINED_CARD)
    save_module(module_folder() / name, card, tensors)
    return Mtp(
        draft_length=draft_length, exit=Fixed(), module=make_reference(module_folder() / name, name)
    )


@cache
def small_mtp(noise: float = 0.1, draft_length: int = 12, threshold: float | None = None) -> Mtp:
    """A draft head of `small_world`'s model."""
    with use_engine("hf"):
        model, _ = tiny_model_and_reference()
        spec = save_mtp(model, f"mtp-{noise:g}.safetensors", noise, draft_length)
    if threshold is None:
        return spec
    return spec.model_copy(update={"exit": Confidence(threshold=threshold)})


def save_s3d(
    model: ModelAdapter,
    mask: SkipMask,
    rank: int | None,
    name: str,
    draft_tokens: int = 4,
    seed: int = 0,
) -> S3D:
    """The spec of a module for s3d with embeddings that are those of some tokens, and small changes
    where there is a rank.
    """
    here = model.spec.device
    some = torch.arange(draft_tokens - 1, device=here)[None]
    tensors = {MASK_EMBEDDINGS: model.embed(some + seed + 5, torch.zeros_like(some))[0].clone()}
    if rank:
        tensors |= noisy_low_rank_changes(model, mask, rank, 0.1, seed)
    card = ModuleCard(
        kind="s3d",
        base=make_base(model.spec),
        attn=mask.attn,
        mlp=mask.mlp,
        form="lora" if rank else "embeddings",
        rank=rank,
        trained=TRAINED_CARD,
    )
    save_module(module_folder() / name, card, tensors)
    return S3D(
        attn=mask.attn,
        mlp=mask.mlp,
        draft_length=draft_tokens,
        module=make_reference(module_folder() / name, name),
    )


@cache
def small_s3d(rank: int | None = None, draft_tokens: int = 4) -> S3D:
    """A module of `small_world`'s model that skips its middle layer."""
    with use_engine("hf"):
        model, _ = tiny_model_and_reference()
    return save_s3d(
        model,
        SkipMask(LAYERS, (2,), (2,)),
        rank,
        f"s3d-{draft_tokens}-{rank}.safetensors",
        draft_tokens,
    )
