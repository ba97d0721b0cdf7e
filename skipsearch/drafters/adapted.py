"""`adapted`: the model drafts with a few of its sub-layers, and with weights for these that were trained for drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.skip import Skip, SkipDrafter
from skipsearch.exits import Exit
from skipsearch.fields import ModuleRef
from skipsearch.mask import SkipMask, sublayers
from skipsearch.recipe import About, Siblings

if TYPE_CHECKING:
    from skipsearch.models.spec import ModelAdapter


class Adapted(Skip):
    """As `skip`, but the sub-layers that the draft keeps have trained weights of their own, taken from a module.

    Verification runs the model's own weights and writes its own K/V, so tokens are the same with any module, and with a bad one.
    """

    kind: Literal["adapted"] = "adapted"  # type: ignore[assignment]
    about = About("skipsearch", "a mask and weights that `train adapted` makes", "lookup before it; siblings")
    module: ModuleRef = Field(description="the trained weights")

    @classmethod
    def trained(cls, mask: SkipMask, draft_length: int, exit_policy: Exit, module: ModuleRef, siblings: Siblings | None = None) -> Adapted:
        return cls(attn=mask.attn, mlp=mask.mlp, draft_length=draft_length, exit=exit_policy, siblings=siblings, module=module)

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        return (self.module,)

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        from skipsearch.modules.weights import drafting_model

        skip = SkipDrafter(self.mask(model.spec.n_layers), self.exit, self.siblings)
        return AdaptedDrafter(skip, drafting_model(model, self.module, folders))

    def __str__(self) -> str:
        n, unit = next((self.module.parameters / size, unit) for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1, ""))
                       if self.module.parameters >= size)
        beside = f", {self.siblings}" if self.siblings else ""
        return (f"adapted, skips {sublayers(len(self.attn) + len(self.mlp))}, {n:.3g}{unit} trained values, {self.exit}, up to "
                f"{self.draft_length}{beside}")


class AdaptedDrafter:
    """A skip drafter on another model. model: what drafts; it writes to the same cache as the one that verifies."""

    def __init__(self, skip: SkipDrafter, model: ModelAdapter):
        self.skip, self.model = skip, model

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return AdaptedSession(self.skip.begin(ctx), self.model)


class AdaptedSession:
    def __init__(self, skip: DraftSession, model: ModelAdapter):
        self.skip, self.model = skip, model

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        return self.skip.draft(replace(ctx, model=self.model), most)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.skip.verified(ctx, path)
