"""`adapted`: the model drafts with a few of its sub-layers, which have trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from skipsearch.core.mask import SkipMask, format_sublayer_count
from skipsearch.core.reading import Vocabulary
from skipsearch.core.recipe import DrafterInfo, Siblings
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.exits import Exit
from skipsearch.drafters.skip.spec import Skip

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter


class Adapted(Skip):
    """Drafts as `skip` does, but the sub-layers that the draft runs have weights from a module.

    Verification runs the model's own weights and writes their K/V, so the emitted tokens do not
    depend on the module."""

    kind: Literal["adapted"] = "adapted"  # type: ignore[assignment]
    info = DrafterInfo(
        "skipsearch", "a mask and weights that `train adapted` makes", "lookup before it; siblings"
    )
    module: ModuleRef = Field(description="the trained weights")

    @classmethod
    def from_module(
        cls,
        mask: SkipMask,
        draft_length: int,
        exit_policy: Exit,
        module: ModuleRef,
        siblings: Siblings | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> Adapted:
        """Return the settings that draft under a mask with the weights of a module."""
        return cls(
            attn=mask.attn,
            mlp=mask.mlp,
            draft_length=draft_length,
            exit=exit_policy,
            siblings=siblings,
            vocabulary=vocabulary,
            module=module,
        )

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.reduced_session import draft_with
        from skipsearch.drafters.skip.session import SkipDrafter
        from skipsearch.drafters.trained.module_weights import load_drafting_model

        skip = SkipDrafter(self.mask(model.spec.n_layers), self.exit, self.siblings)
        drafting_model = load_drafting_model(model, self.module, module_folders)
        return draft_with(skip, drafting_model, self.reading)

    def __str__(self) -> str:
        skipped = format_sublayer_count(len(self.attn) + len(self.mlp))
        n, unit = next(
            (self.module.parameters / size, unit)
            for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1, ""))
            if self.module.parameters >= size
        )
        return (
            f"adapted, skips {skipped}{self.format_reading()}, {n:.3g}{unit} trained values, "
            f"{self.format_limits()}"
        )
