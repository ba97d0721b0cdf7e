"""The model that a draft runs where it has weights of its own, driven by the same engine as the model that verifies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from skipsearch.engine.graph import GraphAdapter
from skipsearch.engine.native import NativeAdapter
from skipsearch.errors import ModelError
from skipsearch.models import variants
from skipsearch.models.hf import HFAdapter
from skipsearch.models.lean import LeanAdapter
from skipsearch.models.spec import ModelAdapter


def underneath(model: ModelAdapter) -> HFAdapter | LeanAdapter:
    """What holds the weights of a model that an engine drives. Raises: ModelError for an engine that is not known here."""
    found = model.lean if isinstance(model, GraphAdapter | NativeAdapter) else model
    if not isinstance(found, HFAdapter | LeanAdapter):
        raise ModelError(f"a draft with weights of its own needs a family of the table, driven by hf, lean, native or graph, and "
                         f"{model.spec.id} is a {model.spec.family} model driven by {model.spec.engine}")
    return found


def natively(model: ModelAdapter, variant: HFAdapter | LeanAdapter) -> ModelAdapter:
    """A variant of a native model under the native engine, which has its weights in its layout already; any other as it is."""
    return NativeAdapter(variant, model.library) if isinstance(model, NativeAdapter) and isinstance(variant, LeanAdapter) else variant


def with_weights(model: ModelAdapter, weights: Mapping[str, Tensor]) -> ModelAdapter:
    """The model with other weights in some sub-layers, as `models.variants` names them; it shares its cache's layout and all else.

    Raises: ModelError.
    """
    variant = variants.with_weights(underneath(model), weights)
    if isinstance(model, GraphAdapter) and isinstance(variant, LeanAdapter):
        return GraphAdapter(variant)
    return natively(model, variant)
