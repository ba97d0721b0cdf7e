"""Decoders of models in memory, kept from one call of `generate` to the next.

So trained weights are read from their file once, and a drafter that learns from requests goes on
where it was. A model that nobody else holds goes at once, with all that was kept for it: decoders
do not keep it alive. They hold no K/V between calls either."""

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
from skipsearch.models import adapt
from skipsearch.models.adapter import ModelSpec
from skipsearch.models.families.unmodified import UnmodifiedModel
from skipsearch.models.fingerprint import forward_fingerprint, weight_fingerprint
from skipsearch.profile import Profile

MAX_PROFILES = (
    2  # profiles of one model, whose trained weights stay in memory: those that were asked for last
)


@dataclass(frozen=True)
class _CachedDecoder:
    """fingerprint: of the model, the profile and its files, as they were when the decoder was
    built.
    """

    fingerprint: tuple[Any, ...]
    decoder: Decoder


_CACHE: WeakKeyDictionary[nn.Module, tuple[_CachedDecoder, ...]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def get_cached_decoder(
    model: nn.Module, spec: ModelSpec, profile: Any, repeatable: bool, exact: bool = False
) -> Decoder:
    """The decoder of an earlier call with this model and profile, or a new one where either or a
    file has changed since.

    spec: of the model as it is now. repeatable: the request's tokens are to depend on nothing that
    earlier ones have taught a drafter. exact: as `Decoder` has it. Raises: as `adapt` and `Decoder`
    do."""
    sign = (spec, exact, *_fingerprint(model, profile))
    with _LOCK:
        known = next((kept for kept in _CACHE.get(model, ()) if kept.fingerprint == sign), None)
    if known is None:
        adapter = adapt(model)
        if isinstance(adapter, UnmodifiedModel):
            adapter.hold_weakly()
        known = _CachedDecoder(sign, Decoder(adapter, profile, exact=exact))
    if repeatable and known.decoder.has_shared_state:
        return Decoder(known.decoder.model, profile, exact=exact)
    with _LOCK:
        _CACHE[model] = (
            known,
            *(kept for kept in _CACHE.get(model, ()) if kept.fingerprint != sign),
        )[:MAX_PROFILES]
    return known.decoder


def release_kv(decoder: Decoder) -> None:
    """A call is over: let go of its K/V."""
    decoder.loop.idle_caches = []
    if isinstance(decoder.model, UnmodifiedModel):
        decoder.model.drop_last_pass()


def evict_decoders(model: nn.Module) -> None:
    """Keep nothing for this model any more."""
    with _LOCK:
        _CACHE.pop(model, None)


def _fingerprint(model: nn.Module, profile: Any) -> tuple[Any, ...]:
    """Equal as long as a decoder would be built alike: the same modules, code and weights, the same
    profile, the same files.
    """
    said, files = profile, tuple[Any, ...]()
    if isinstance(profile, Profile):
        said, files = (
            (profile.model_dump_json(), profile.module_folders),
            _stat_module_files(profile.recipe, profile.module_folders),
        )
    return (forward_fingerprint(model), weight_fingerprint(model), said, files)


def _stat_module_files(recipe: Recipe, folders: Sequence[Path]) -> tuple[Any, ...]:
    """What a look at a folder tells of each file with trained weights."""
    found: list[Any] = []
    for path in (folder / ref.file for ref in recipe.modules for folder in folders):
        try:
            stat = path.stat()
        except OSError:
            found.append((path, None))
        else:
            found.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)
