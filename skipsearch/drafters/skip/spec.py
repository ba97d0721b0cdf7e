"""`skip`: the model drafts for itself without some of its sub-layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from skipsearch.core.mask import SkipMask, format_sublayer_count
from skipsearch.core.reading import READ_ALL, Reading
from skipsearch.core.recipe import (
    EXITS,
    DrafterInfo,
    DraftSiblings,
    ReadingSpec,
    Siblings,
    make_spec_union,
)
from skipsearch.core.schema_types import SkippedLayers
from skipsearch.drafters.exits import Exit

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter

    AnyExit = Exit
else:
    AnyExit = make_spec_union(EXITS)


class Skip(ReadingSpec):
    """Drafts with the model itself, which reads less of itself.

    A draft pass leaves out the sub-layers of a mask. It may also read its weights in fewer bits,
    and compute the logits of fewer tokens. Each pass drafts one token, until the exit policy ends
    the draft.
    """

    kind: Literal["skip"] = "skip"
    info = DrafterInfo(
        "Draft & Verify (Zhang et al. 2023)",
        "a mask, which `tune` searches on calibration prompts",
        "lookup before it; siblings",
    )
    attn: SkippedLayers = Field(
        description="layers whose attention the draft skips, 0..n_layers-1, ascending"
    )
    mlp: SkippedLayers = Field(
        description="layers whose MLP the draft skips, 0..n_layers-1, ascending"
    )
    exit: AnyExit
    siblings: DraftSiblings = None

    @classmethod
    def from_mask(
        cls,
        mask: SkipMask,
        draft_length: int,
        exit_policy: Exit,
        siblings: Siblings | None = None,
        reading: Reading = READ_ALL,
    ) -> Skip:
        """Return the settings that draft under a mask. reading: what a draft pass reads."""
        return cls(
            attn=mask.attn,
            mlp=mask.mlp,
            weights=reading.weights,
            vocabulary=reading.vocabulary,
            draft_length=draft_length,
            exit=exit_policy,
            siblings=siblings,
        )

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.reduced_session import reduce_reading
        from skipsearch.drafters.skip.session import SkipDrafter

        skip = SkipDrafter(self.mask(model.spec.n_layers), self.exit, self.siblings)
        return reduce_reading(skip, model, self.reading)

    def mask(self, n_layers: int) -> SkipMask:
        return SkipMask(n_layers, self.attn, self.mlp)

    def __str__(self) -> str:
        n_skipped = len(self.attn) + len(self.mlp)
        if n_skipped:
            draft = f"skip {format_sublayer_count(n_skipped)}{self.format_reading()}"
        else:
            draft = "skip nothing" if self.reading.is_everything else f"read less: {self.reading}"
        return f"{draft}, {self.format_limits()}"
