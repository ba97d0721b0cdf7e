"""Kangaroo's adapter: a small layer from the output of an early layer to the input of the head.

    f = layers 0 … exit − 1 of the model         frozen
    f' = f + Attention(norm(f))                  the adapter; in the form `layer` an MLP follows
    logits = head(norm_A(f'))                    the model's head, norm_A instead of the final norm

Hidden states below the exit are the full model's, so one adapter pass over a text computes exactly
what rounds of decoding would draft at each position. Source: Kangaroo (Liu et al. 2024), section
3.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.trained.card import ModuleCard
from skipsearch.drafters.trained.module_weights import check_card, load_referenced
from skipsearch.engine import get_layer_runner, run_up_to_layer
from skipsearch.engine.on_same_engine import base_adapter, on_same_engine
from skipsearch.errors import ModelError, ModuleError
from skipsearch.models import weight_overlay
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

# The adapter's sub-layers, by its form.
SUBLAYERS_BY_FORM = {"attention": ("attn",), "layer": ("attn", "mlp")}
# Prefix of tensor names in a file; the names of `models.weight_overlay` follow.
ADAPTER_PREFIX = "adapter."


class EarlyExitDraft:
    """The part of a model that drafts: first layers, adapter, head, and a cache of its own.

    model: runs the layers below the exit. adapter: the model with the adapter as one more layer
    (`weight_overlay.append_layer`).
    """

    def __init__(self, model: ModelAdapter, adapter: ModelAdapter, exit_layer: int, form: str):
        self.model, self.adapter, self.exit_layer, self.form = model, adapter, exit_layer, form
        n = model.spec.n_layers
        # The form `attention` has no MLP.
        self._adapter_mask = None if form == "layer" else SkipMask(n + 1, mlp=(n,))

    def new_cache(self, capacity: int) -> KVCache:
        """Return a cache for one text: the layers below the exit, then the adapter as layer L."""
        self.model.new_cache(1, capacity)  # extends rotary tables and masks to `capacity`
        return KVCache(self.model.spec.n_layers + 1, 1, capacity)

    def compute_features(self, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        """Run tokens [B, T] up to the exit; return the adapter's input, [B, T, H]."""
        return run_up_to_layer(self.model, self.exit_layer, tokens, cache, plan)

    def run_adapter(self, features: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
        """Run the adapter; return the input of the head, [B, T, H]."""
        return self.adapter.block(
            self.model.spec.n_layers, features, cache, plan, attn=True, mlp=self.form == "layer"
        )

    def head(self, h: Tensor) -> Tensor:
        return self.adapter.head(h)

    def compute_last_logits(
        self, adapter: ModelAdapter, features: Tensor, cache: KVCache, plan: PassPlan
    ) -> Tensor:
        """Return the logits [1, rows of the head] at the last row of features [1, T, H].

        adapter: that of this draft, or the same with fewer rows of the head.
        """
        n = self.model.spec.n_layers
        if (run := get_layer_runner(adapter)) is not None:
            return run(features, cache, plan, self._adapter_mask, n, n + 1, True, True)[:, -1]
        return adapter.head(self.run_adapter(features, cache, plan)[:, -1:])[:, -1]


def load_early_exit(model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]) -> EarlyExitDraft:
    """Load the draft of a module.

    Raises: ModuleError for a file that is missing, damaged, or made for another model."""
    return build_early_exit(model, *load_referenced(ref, folders))


def build_early_exit(
    model: ModelAdapter, card: ModuleCard, tensors: Mapping[str, Tensor], name: str
) -> EarlyExitDraft:
    """Build the draft from tensors that were read already. name: their file's name, for errors."""
    check_card(card, "kangaroo", model.spec, name)
    assert card.exit_layer is not None  # a card of this kind has one
    base, n = base_adapter(model), model.spec.n_layers
    try:
        adapter = weight_overlay.append_layer(base, card.exit_layer)
        placed = {
            to_model_key(key, n): tensor
            for key, tensor in tensors.items()
            if key.startswith(ADAPTER_PREFIX)
        }
        norm = {
            key: tensor for key, tensor in tensors.items() if not key.startswith(ADAPTER_PREFIX)
        }
        sublayers = {key.split(".")[1] for key in placed}
        if sublayers != set(SUBLAYERS_BY_FORM[card.form]):
            raise ModelError(
                f"an adapter of the form {card.form} has "
                f"{' and '.join(SUBLAYERS_BY_FORM[card.form])}, and this one {sorted(sublayers)}"
            )
        adapter = weight_overlay.overlay_final_norm(
            weight_overlay.overlay_sublayer_weights(adapter, placed), norm
        )
    except (ModelError, ValueError, IndexError) as error:
        raise ModuleError(
            f"{name}: this module does not fit {model.spec.id}: {error}; train one for this model"
        ) from None
    return EarlyExitDraft(model, on_same_engine(model, adapter), card.exit_layer, card.form)


def to_model_key(key: str, layer: int) -> str:
    """Return the key of a weight in the model: `adapter.attn.…` -> `20.attn.…` for 20 layers."""
    return f"{layer}.{key.removeprefix(ADAPTER_PREFIX)}"


@torch.no_grad()
def predict_text(draft: EarlyExitDraft, tokens: Sequence[int]) -> Tensor:
    """Return the logits after each token of a text, [T, V], as drafts in decoding have them."""
    device = draft.model.spec.device
    cache, plan = (
        draft.new_cache(len(tokens)),
        Planner(len(tokens), device).plan_chain(0, len(tokens)),
    )
    features = draft.compute_features(torch.tensor([list(tokens)], device=device), cache, plan)
    return draft.head(draft.run_adapter(features, cache, plan))[0]
