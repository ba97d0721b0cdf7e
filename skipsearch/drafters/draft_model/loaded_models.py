"""Draft models in memory, by the references that settings have to them.

A model stays in this table as long as something else uses it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

from skipsearch.core.schema_types import DraftModelRef
from skipsearch.errors import ModelError
from skipsearch.models.adapter import ModelAdapter, ModelSpec

_loaded: WeakValueDictionary[tuple[DraftModelRef, str], ModelAdapter] = WeakValueDictionary()
# Hashes of models without files. They hold for this process.
_hashes: WeakKeyDictionary[ModelAdapter, str] = WeakKeyDictionary()


def refer_to_draft_model(model: ModelAdapter, name: str | None = None) -> DraftModelRef:
    """Return the reference to a loaded model, with which settings name it as their draft model.

    The caller holds the model until a decoder is made with these settings.
    name: with which the model was loaded; None: the model's id.
    """
    ref = DraftModelRef(
        id=_shared_name(model.spec, name),
        weights_sha256=_hash_of(model),
        n_layers=model.spec.n_layers,
        weight_bytes=model.weight_bytes,
        dtype=model.spec.dtype_name,  # type: ignore[arg-type]
        quantization=model.spec.quantization,
    )
    provide_draft_model(ref, model)
    return ref


def provide_draft_model(ref: DraftModelRef, model: ModelAdapter) -> None:
    """Let settings with this reference draft with a model in memory.

    Raises: ModelError if it is another model.
    """
    same_hash = model.spec.weights_sha256 in (None, ref.weights_sha256)
    if not same_hash or model.spec.n_layers != ref.n_layers:
        own = f"{model.spec.weights_sha256 or 'none'}"[:12]
        raise ModelError(
            f"the profile's draft model is {ref.id} with {ref.n_layers} layers (weights "
            f"{ref.weights_sha256[:12]}…), and {model.spec.id} has {model.spec.n_layers} layers "
            f"(weights {own}…): load the one that the profile names"
        )
    _loaded[ref, str(model.spec.device)] = model


def find_draft_model(ref: DraftModelRef, model: ModelAdapter) -> ModelAdapter | None:
    """Return the draft model in the memory of a full model's device; None if none is loaded."""
    return _loaded.get((ref, str(model.spec.device)))


def _shared_name(spec: ModelSpec, name: str | None) -> str:
    """Return a name without the folders of this machine; a Hub id has its revision."""
    if name is not None and Path(name).expanduser().exists():
        return Path(name).expanduser().absolute().name
    return f"{spec.id}@{spec.revision}" if spec.revision else spec.id


def _hash_of(model: ModelAdapter) -> str:
    if model.spec.weights_sha256 is not None:
        return model.spec.weights_sha256
    return _hashes.setdefault(model, hashlib.sha256(uuid4().bytes).hexdigest())
