"""Load the draft models that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skipsearch.core.recipe import Recipe
from skipsearch.core.schema_types import DraftModelRef
from skipsearch.drafters.draft_model.loaded_models import find_draft_model, provide_draft_model
from skipsearch.engine import load_for_switching, pick_fastest, switch_engine
from skipsearch.errors import ModelError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.loading.quantize import loadable_quantization
from skipsearch.profile.model_locations import find_draft_model_argument


def load_draft_models(
    recipe: Recipe, model: ModelAdapter, folders: Sequence[Path] = ()
) -> list[ModelAdapter]:
    """Return the draft models of a recipe, on the device of the full model.

    Those that are not in memory are loaded. folders: in which local models are looked up, too.
    Raises: ModelError if one is missing, or is another model than the recipe names.
    """
    return [
        find_draft_model(ref, model) or _load_referenced(ref, model, folders)
        for ref in recipe.draft_models
    ]


def load_draft_model(
    name: str, model: ModelAdapter, dtype: str | None = None, quantization: str | None = None
) -> ModelAdapter:
    """Load a model that drafts for another one, on its device, and on its engine if that can be.

    name: as for `load_model`. dtype: None: the full model's. Raises: ModelError.
    """
    engine = model.spec.engine
    draft_model = load_for_switching(
        name,
        str(model.spec.device),
        dtype or model.spec.dtype_name,
        quantization,
        preferred_engine=engine,
    )
    return switch_engine(draft_model, engine) or pick_fastest(draft_model).model


def _load_referenced(
    ref: DraftModelRef, model: ModelAdapter, folders: Sequence[Path]
) -> ModelAdapter:
    name = find_draft_model_argument(ref, folders)
    draft_model = load_draft_model(name, model, ref.dtype, loadable_quantization(ref.quantization))
    if draft_model.spec.weights_sha256 != ref.weights_sha256:
        raise ModelError(
            f"{name} is another model than the draft model {ref.id} of this profile: its weights "
            f"have the hash {str(draft_model.spec.weights_sha256)[:12]}… and not "
            f"{ref.weights_sha256[:12]}…; put the right file in its place, or tune again"
        )
    provide_draft_model(ref, draft_model)
    return draft_model
