"""Run a draft that has its own weights on the engine of the verifying model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from skipsearch.engine.cuda_graph import GraphAdapter
from skipsearch.engine.native import NativeAdapter
from skipsearch.errors import ModelError
from skipsearch.models import weight_overlay
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.families.hf_adapter import HFAdapter
from skipsearch.models.fused.fused_adapter import FusedAdapter


def base_adapter(model: ModelAdapter) -> HFAdapter | FusedAdapter:
    """Return the adapter that holds the weights of a model, whichever engine runs it.

    Raises: ModelError for a model whose engine and family have no such adapter.
    """
    base = model.fused_model if isinstance(model, GraphAdapter | NativeAdapter) else model
    if not isinstance(base, HFAdapter | FusedAdapter):
        raise ModelError(
            "a draft with weights of its own needs a family of the table, driven by hf, lean, "
            "native or graph, and "
            f"{model.spec.id} is a {model.spec.family} model driven by {model.spec.engine}"
        )
    return base


def on_same_engine(model: ModelAdapter, overlaid: HFAdapter | FusedAdapter) -> ModelAdapter:
    """Put `overlaid` on the engine `native` if `model` runs on it; else return it unchanged.

    overlaid: a variant of `model` with other weights. For the engine `native`, its weights must be
    in the native layout already.
    """
    return (
        NativeAdapter(overlaid, model.library)
        if isinstance(model, NativeAdapter) and isinstance(overlaid, FusedAdapter)
        else overlaid
    )


def overlay_weights(model: ModelAdapter, weights: Mapping[str, Tensor]) -> ModelAdapter:
    """Return the model with other weights in some sub-layers; all other weights are shared.

    weights: by name, as `models.weight_overlay` names them.
    Raises: ModelError.
    """
    variant = weight_overlay.overlay_sublayer_weights(base_adapter(model), weights)
    if isinstance(model, GraphAdapter) and isinstance(variant, FusedAdapter):
        return GraphAdapter(variant)
    return on_same_engine(model, variant)
