"""Modules for tiny models without any training: the kept sub-layers' own weights, moved a little at random."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.drafters.adapted import Adapted
from skipsearch.drafters.kangaroo import Kangaroo
from skipsearch.drafters.s3d import S3D
from skipsearch.engine.variants import underneath
from skipsearch.exits.base import Exit
from skipsearch.exits.confidence import Confidence
from skipsearch.exits.fixed import Fixed
from skipsearch.mask import SkipMask
from skipsearch.models import ModelAdapter, variants
from skipsearch.modules.card import Card, Trained
from skipsearch.modules.files import reference
from skipsearch.modules.kangaroo import untrained
from skipsearch.modules.s3d import UNKNOWN
from skipsearch.modules.weights import base_of, save_module

from .tiny import LAYERS, driven_by, small_world

MASK = SkipMask(LAYERS, (1, 3), (0, 2))
TRAINED = Trained(text="a test's", licence="none", tokens=1, rows=1, steps=1, seconds=0.0, seed=0, device="cpu", dtype="float64",
                  created="2026-01-01", before=0.5, after=0.5)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="modules-")


def folder() -> Path:
    """Where the modules of this process lie; it goes with it."""
    return Path(_folder().name)


def card_of(model: ModelAdapter, mask: SkipMask, rank: int | None = None) -> Card:
    return Card(kind="adapted", base=base_of(model.spec), attn=mask.attn, mlp=mask.mlp, form="lora" if rank else "copy", rank=rank,
                trained=TRAINED)


def copies(model: ModelAdapter, mask: SkipMask, noise: float, seed: int = 0) -> dict[str, Tensor]:
    """Weights for each sub-layer that the mask keeps. noise: beside the size of the model's own."""
    random = torch.Generator().manual_seed(seed)
    own = {name: weight for i, kind in variants.kept(mask) for name, weight in variants.weights_of(underneath(model), i, kind).items()}
    return {name: _moved(own[name], noise, random) for name in sorted(own)}   # in an order of their own, whatever engine has them


def changes(model: ModelAdapter, mask: SkipMask, rank: int, noise: float, seed: int = 0) -> dict[str, Tensor]:
    """Low-rank changes of every matrix that the mask keeps."""
    random, found = torch.Generator().manual_seed(seed), {}
    for name, weight in copies(model, mask, 0.0).items():
        if weight.ndim == 2:
            out, into = weight.shape
            found[f"{name}:down"] = torch.randn(rank, into, generator=random, dtype=weight.dtype) * into**-0.5
            found[f"{name}:up"] = noise * torch.randn(out, rank, generator=random, dtype=weight.dtype)
    return found


def saved(model: ModelAdapter, mask: SkipMask, tensors: Mapping[str, Tensor], name: str, rank: int | None = None, draft_length: int = 4,
          exit_policy: Exit | None = None) -> Adapted:
    """The spec of a module, which lies in `folder` then."""
    save_module(folder() / name, card_of(model, mask, rank), tensors)
    return Adapted.trained(mask, draft_length, exit_policy or Fixed(), reference(folder() / name, name))


def _moved(weight: Tensor, noise: float, random: torch.Generator) -> Tensor:
    size = float(weight.std()) if weight.ndim > 1 else 1.0   # a norm's weights are all the same
    return weight + noise * size * torch.randn(weight.shape, generator=random, dtype=weight.dtype).to(weight.device)


@cache
def small_module(noise: float = 0.1, draft_length: int = 12, mask: SkipMask = MASK) -> Adapted:
    """A module of `small_world`'s model."""
    with driven_by("hf"):
        model, _ = small_world()
    return saved(model, mask, copies(model, mask, noise), f"small-{noise:g}-{abs(hash(mask))}.safetensors", draft_length=draft_length)


def adapter_tensors(model: ModelAdapter, exit_layer: int, form: str, noise: float, seed: int = 0) -> dict[str, Tensor]:
    """An adapter for kangaroo: a copy of the exit layer, moved a little at random."""
    random = torch.Generator().manual_seed(seed)
    own = untrained(model, exit_layer, form)[1]
    return {name: _moved(own[name], noise, random) for name in sorted(own)}   # in an order of their own, whatever engine has them


def early_card(model: ModelAdapter, exit_layer: int, form: str) -> Card:
    above = tuple(range(exit_layer, model.spec.n_layers))
    return Card(kind="kangaroo", base=base_of(model.spec), attn=above, mlp=above, form=form, rank=None, exit_layer=exit_layer,  # type: ignore[arg-type]
                trained=TRAINED)


def kangaroo(model: ModelAdapter, exit_layer: int, form: str, noise: float, name: str, draft_length: int = 4,
             exit_policy: Exit | None = None) -> Kangaroo:
    """The spec of an adapter, which lies in `folder` then."""
    save_module(folder() / name, early_card(model, exit_layer, form), adapter_tensors(model, exit_layer, form, noise))
    return Kangaroo(exit_layer=exit_layer, draft_length=draft_length, exit=exit_policy or Fixed(), module=reference(folder() / name, name))


@cache
def small_kangaroo(form: str = "attention", noise: float = 0.1, draft_length: int = 12, threshold: float | None = None) -> Kangaroo:
    """An adapter of `small_world`'s model, behind its first two layers."""
    policy = None if threshold is None else Confidence(threshold=threshold)
    with driven_by("hf"):
        model, _ = small_world()
    return kangaroo(model, 2, form, noise, f"kangaroo-{form}-{noise:g}.safetensors", draft_length, policy)


def s3d(model: ModelAdapter, mask: SkipMask, rank: int | None, name: str, ahead: int = 4, seed: int = 0) -> S3D:
    """The spec of a module for s3d with embeddings that are those of some tokens, and small changes where there is a rank."""
    here = model.spec.device
    some = torch.arange(ahead - 1, device=here)[None]
    tensors = {UNKNOWN: model.embed(some + seed + 5, torch.zeros_like(some))[0].clone()}
    if rank:
        tensors |= changes(model, mask, rank, 0.1, seed)
    card = Card(kind="s3d", base=base_of(model.spec), attn=mask.attn, mlp=mask.mlp, form="lora" if rank else "embeddings", rank=rank,
                trained=TRAINED)
    save_module(folder() / name, card, tensors)
    return S3D(attn=mask.attn, mlp=mask.mlp, draft_length=ahead, module=reference(folder() / name, name))


@cache
def small_s3d(rank: int | None = None, ahead: int = 4) -> S3D:
    """A module of `small_world`'s model that skips its middle layer."""
    with driven_by("hf"):
        model, _ = small_world()
    return s3d(model, SkipMask(LAYERS, (2,), (2,)), rank, f"s3d-{ahead}-{rank}.safetensors", ahead)
