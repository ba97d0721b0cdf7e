"""S3D's trained weights: embeddings of unknown tokens, with which one pass drafts several tokens.

    rows      embed(t_i), M_1, …, M_{γ-1} at positions i, …, i + γ − 1; each sees the rows before it
              and the full model's K/V before i
    tier E    the embeddings M alone, H values each
    tier L    low-rank changes of the kept sub-layers too, for draft rows only; verification runs
              the model's own weights

Row k predicts token i + k + 1 without the tokens between. The published S3D trains the kept layers
of the model itself, which changes the model's text. This module keeps the text. Source: S3D (Zhong
& Bharadwaj 2024), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.trained.card import ModuleCard
from skipsearch.drafters.trained.module_weights import apply_module, check_card, load_referenced
from skipsearch.engine import run_layers
from skipsearch.errors import ModuleError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan

MASK_EMBEDDINGS = "unknown.weight"  # [γ − 1, H]: the embeddings of unknown tokens


class MultiTokenDraft:
    """A model that drafts all tokens in one pass.

    model: the model that the pass runs under `mask`. mask_embeddings: [γ − 1, H].
    """

    def __init__(self, model: ModelAdapter, mask: SkipMask, mask_embeddings: Tensor):
        self.model, self.mask, self.mask_embeddings = model, mask, mask_embeddings

    @property
    def max_tokens(self) -> int:
        """γ, the most tokens of a draft."""
        return 1 + len(self.mask_embeddings)

    def run_draft_layers(
        self, token: Tensor, n_rows: int, cache: KVCache, plan: PassPlan
    ) -> Tensor:
        """Run a token [B, 1] and n_rows − 1 unknown tokens through the layers under the mask.

        n_rows: at most γ. Returns the input of the head, [B, n_rows, H].
        """
        known = self.model.embed(token, plan.positions[:, :1])
        unknown = self.mask_embeddings[: n_rows - 1].to(known).expand(len(token), -1, -1)
        return run_layers(self.model, torch.cat([known, unknown], dim=1), cache, plan, self.mask)


def load_multi_token(
    model: ModelAdapter, ref: ModuleRef, folders: Sequence[Path]
) -> MultiTokenDraft:
    """Load the draft of a module.

    Raises: ModuleError for a file that is missing, damaged, or made for another model."""
    return build_multi_token(model, *load_referenced(ref, folders))


def build_multi_token(
    model: ModelAdapter, card: ModuleCard, tensors: Mapping[str, Tensor], name: str
) -> MultiTokenDraft:
    """Build the draft from tensors that were read already. name: their file's name, for errors."""
    check_card(card, "s3d", model.spec, name)
    changes = {key: tensor for key, tensor in tensors.items() if key != MASK_EMBEDDINGS}
    unknown = tensors.get(MASK_EMBEDDINGS)
    if (
        unknown is None
        or unknown.ndim != 2
        or unknown.shape[1] != model.spec.hidden_size
        or not len(unknown)
    ):
        raise ModuleError(
            f"{name}: this module does not fit {model.spec.id}: it needs {MASK_EMBEDDINGS} of "
            f"[tokens, {model.spec.hidden_size}]; train "
            "one for this model"
        )
    if bool(changes) != (card.form == "lora"):
        raise ModuleError(
            f"{name}: its card says {card.form}, and its tensors do not; train it again"
        )
    drafting = apply_module(model, card, changes, name) if changes else model
    return MultiTokenDraft(drafting, card.mask, unknown.to(model.spec.device, model.spec.dtype))
