"""`draft-model`: a second, smaller model drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from skipsearch.core.mask import SkipMask, format_sublayer_count
from skipsearch.core.recipe import DrafterInfo, DraftSiblings, ReadingSpec
from skipsearch.core.schema_types import DraftModelRef, SkippedLayers, is_falsy
from skipsearch.drafters.skip.spec import AnyExit

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter


class DraftModel(ReadingSpec):
    """Drafts with another model that has the same tokens.

    The draft model reads the text into a cache of its own. Its passes may leave out sub-layers of
    its own, and read fewer bits or fewer tokens. Each pass drafts one token, until the exit policy
    ends the draft. Source: Leviathan et al. 2023 (arXiv 2211.17192).
    """

    kind: Literal["draft-model"] = "draft-model"
    info = DrafterInfo(
        "Leviathan et al. (2023)",
        "a smaller model with the same tokens; `tune --draft-models` tries it",
        "lookup before it; siblings",
    )
    model: DraftModelRef = Field(description="the model that drafts")
    attn: SkippedLayers = Field(
        default=(),
        exclude_if=is_falsy,
        description="layers of the draft model whose attention is skipped; left out: none",
    )
    mlp: SkippedLayers = Field(
        default=(),
        exclude_if=is_falsy,
        description="layers of the draft model whose MLP is skipped; left out: none",
    )
    exit: AnyExit
    siblings: DraftSiblings = None

    @property
    def draft_model(self) -> DraftModelRef:
        return self.model

    @property
    def own_mask(self) -> SkipMask:
        """The sub-layers of the draft model that a pass leaves out. Raises: MaskError."""
        return SkipMask(self.model.n_layers, self.attn, self.mlp)

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        """Make the drafter. The draft model is loaded already (`loaded_models.py`).

        Raises: MaskError for a layer or a token that a model lacks; ModelError if the draft model
            is not loaded, or its tokens differ from the full model's.
        """
        from skipsearch.drafters.draft_model.session import make_draft_model_drafter

        return make_draft_model_drafter(self, model)

    def __str__(self) -> str:
        n_skipped = len(self.attn) + len(self.mlp)
        parts = [
            f"draft-model {self.model.id}",
            *([f"without {format_sublayer_count(n_skipped)}"] if n_skipped else []),
            *([] if self.reading.is_everything else [str(self.reading)]),
            self.format_limits(),
        ]
        return ", ".join(parts)
