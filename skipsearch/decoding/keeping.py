"""Decoders of models in memory, kept from one call of `generate` to the next.

So trained weights are read from their file once, and a drafter that learns from requests goes on where it was. A model that nobody else
holds goes at once, with all that was kept for it: decoders do not keep it alive. They hold no K/V between calls either.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from skipsearch.decoding.decoder import Decoder
from skipsearch.models import adapt
from skipsearch.models.spec import ModelSpec
from skipsearch.models.weighed import Weighed
from skipsearch.profile import Profile
from skipsearch.recipe import Recipe

MOST = 2   # profiles of one model, whose trained weights stay in memory: those that were asked for last


@dataclass(frozen=True)
class _Kept:
    """sign: of the model, the profile and its files, as they were when the decoder was built."""

    sign: tuple[Any, ...]
    decoder: Decoder


_KEPT: WeakKeyDictionary[nn.Module, tuple[_Kept, ...]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def kept_decoder(model: nn.Module, spec: ModelSpec, profile: Any, repeatable: bool) -> Decoder:
    """The decoder of an earlier call with this model and profile, or a new one where either or a file has changed since.

    spec: of the model as it is now. repeatable: the request's tokens are to depend on nothing that earlier ones have taught a drafter.
    Raises: as `adapt` and `Decoder` do.
    """
    sign = (spec, *_sign(model, profile))
    with _LOCK:
        known = next((kept for kept in _KEPT.get(model, ()) if kept.sign == sign), None)
    if known is None:
        adapter = adapt(model)
        if isinstance(adapter, Weighed):
            adapter.loosen()
        known = _Kept(sign, Decoder(adapter, profile))
    if repeatable and known.decoder.lasting:
        return Decoder(known.decoder.model, profile)
    with _LOCK:
        _KEPT[model] = (known, *(kept for kept in _KEPT.get(model, ()) if kept.sign != sign))[:MOST]
    return known.decoder


def rest(decoder: Decoder) -> None:
    """A call is over: let go of its K/V."""
    decoder.loop.spare = []
    if isinstance(decoder.model, Weighed):
        decoder.model.forget()


def let_go(model: nn.Module) -> None:
    """Keep nothing for this model any more."""
    with _LOCK:
        _KEPT.pop(model, None)


def _sign(model: nn.Module, profile: Any) -> tuple[Any, ...]:
    """Equal as long as a decoder would be built alike: the same modules with the same weights, the same profile, the same files."""
    said, files = profile, tuple[Any, ...]()
    if isinstance(profile, Profile):
        said, files = (profile.model_dump_json(), profile.folders), _files(profile.recipe, profile.folders)
    weights = tuple((id(weight), weight.data_ptr(), None if weight.is_inference() else weight._version) for weight in model.parameters())
    return (tuple(map(id, model.modules())), weights, said, files)


def _files(recipe: Recipe, folders: Sequence[Path]) -> tuple[Any, ...]:
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
