"""Decoders of models in memory, cached between calls of `generate`.

The cache has two uses: trained weights are read from their file once, and a drafter that learns
from requests keeps what it has learned. A decoder does not keep its model alive. If nothing else
references the model, its decoders are dropped with it. Between calls, decoders hold no K/V.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from skipsearch.core.recipe import Recipe
from skipsearch.decoding.decoder import Decoder
from skipsearch.drafters.draft_model.loaded_models import provide_draft_model
from skipsearch.errors import ModelError
from skipsearch.models import adapt
from skipsearch.models.adapter import ModelAdapter, ModelSpec
from skipsearch.models.families.unmodified import UnmodifiedModel
from skipsearch.models.fingerprint import forward_fingerprint, weight_fingerprint
from skipsearch.profile import Profile

MAX_PROFILES = 2  # most recently used profiles of a model, whose trained weights stay in memory


@dataclass(frozen=True)
class _CachedDecoder:
    """A decoder and what it was built from.

    fingerprint: of the model, the profile and its files at that time.
    """

    fingerprint: tuple[Any, ...]
    decoder: Decoder


_CACHE: WeakKeyDictionary[nn.Module, tuple[_CachedDecoder, ...]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def get_cached_decoder(
    model: nn.Module,
    spec: ModelSpec,
    profile: Any,
    repeatable: bool,
    exact: bool = False,
    draft_model: nn.Module | None = None,
) -> Decoder:
    """Return the decoder of an earlier call with this model, profile and draft model.

    If one of them or a file has changed since, build a new one.
    spec: the present spec of the model. draft_model: the one that the profile names, in memory.
    repeatable: the tokens must not depend on what earlier requests have taught a drafter.
    exact: as for `Decoder`.

    Raises: the errors of `adapt` and `Decoder`.
    """
    fingerprint = (spec, exact, *_fingerprint(model, profile))
    if draft_model is not None:
        fingerprint += forward_fingerprint(draft_model), weight_fingerprint(draft_model)
    with _LOCK:
        entries = _CACHE.get(model, ())
        known = next((entry for entry in entries if entry.fingerprint == fingerprint), None)
    if known is None:
        adapter = adapt(model)
        if isinstance(adapter, UnmodifiedModel):
            adapter.hold_weakly()
        drafting = None if draft_model is None else _provide(draft_model, profile, adapter)
        known = _CachedDecoder(fingerprint, Decoder(adapter, profile, exact=exact))
        del drafting  # the decoder holds it
    if repeatable and known.decoder.has_shared_state:
        return Decoder(known.decoder.model, profile, exact=exact)
    with _LOCK:
        _CACHE[model] = (
            known,
            *(entry for entry in _CACHE.get(model, ()) if entry.fingerprint != fingerprint),
        )[:MAX_PROFILES]
    return known.decoder


def _provide(draft_model: nn.Module, profile: Any, model: ModelAdapter) -> ModelAdapter:
    """Return a draft model in memory, with which a decoder of the profile can then be made.

    Raises: ModelError if the profile names none, or another one, or if it is on another device.
    """
    recipe = profile.recipe if isinstance(profile, Profile) else profile
    refs = recipe.draft_models if isinstance(recipe, Recipe) else ()
    if not refs:
        raise ModelError(
            "draft_model was given, and this profile has no drafter draft-model: leave it out, or "
            "take a profile of `skipsearch tune --draft-models`"
        )
    adapter = adapt(draft_model)
    if adapter.spec.device != model.spec.device:
        raise ModelError(
            f"the draft model is on {adapter.spec.device} and the model on {model.spec.device}: "
            "move one of them with .to(device)"
        )
    for ref in refs:
        provide_draft_model(ref, adapter)
    return adapter


def release_kv(decoder: Decoder) -> None:
    """Drop the K/V of a decoder, at the end of a call."""
    decoder.loop.idle_caches = []
    for model in (decoder.model, *decoder.loop.draft_models):
        if isinstance(model, UnmodifiedModel):
            model.drop_last_pass()


def evict_decoders(model: nn.Module) -> None:
    """Drop all cached decoders of this model."""
    with _LOCK:
        _CACHE.pop(model, None)


def _fingerprint(model: nn.Module, profile: Any) -> tuple[Any, ...]:
    """Return a value that stays equal as long as a decoder would be built alike.

    It covers modules, code, weights, the profile and its files.
    """
    content, files = profile, tuple[Any, ...]()
    if isinstance(profile, Profile):
        content, files = (
            (profile.model_dump_json(), profile.module_folders),
            _stat_module_files(profile.recipe, profile.module_folders),
        )
    return (forward_fingerprint(model), weight_fingerprint(model), content, files)


def _stat_module_files(recipe: Recipe, folders: Sequence[Path]) -> tuple[Any, ...]:
    """Return (path, inode, size, mtime, ctime) of each file of trained weights, in every folder.

    The files are those that the recipe names. The entry of a missing file is (path, None).
    """
    stats: list[Any] = []
    for path in (folder / ref.file for ref in recipe.modules for folder in folders):
        try:
            stat = path.stat()
        except OSError:
            stats.append((path, None))
        else:
            stats.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(stats)
