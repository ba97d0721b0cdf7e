"""`s3d`: one pass of the thinned model drafts several tokens at once, from trained embeddings of what it does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.skip import ascending
from skipsearch.fields import Layers, ModuleRef
from skipsearch.mask import SkipMask
from skipsearch.recipe import About, DrafterSpec

if TYPE_CHECKING:
    from skipsearch.models.spec import ModelAdapter
    from skipsearch.modules.s3d import Simultaneous


class S3D(DrafterSpec):
    """Every row of the draft pass but the first stands for a token that nobody knows, so its tokens do not depend on each other, and the
    round costs one draft pass whatever its length. Source: S3D (Zhong & Bharadwaj 2024), section 3.
    """

    kind: Literal["s3d"] = "s3d"
    about = About("S3D (Zhong & Bharadwaj 2024)", "embeddings and changes that `train s3d` makes", "lookup before it")
    attn: Layers = Field(description="layers whose attention the draft skips, 0..n_layers-1, ascending")
    mlp: Layers = Field(description="layers whose MLP the draft skips, 0..n_layers-1, ascending")
    module: ModuleRef = Field(description="the trained embeddings and, if any, low-rank changes")

    @field_validator("attn", "mlp")
    @classmethod
    def _ascending_and_unique(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        return ascending(layers)

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        return (self.module,)

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        from skipsearch.errors import ModuleError
        from skipsearch.modules.s3d import simultaneous

        found = simultaneous(model, self.module, folders)
        if found.mask != self.mask(model.spec.n_layers):
            raise ModuleError(f"{self.module.file}: this module was trained for another mask than the recipe has")
        return S3DDrafter(found)

    def mask(self, n_layers: int) -> SkipMask:
        return SkipMask(n_layers, self.attn, self.mlp)

    def __str__(self) -> str:
        return f"s3d, skips {len(self.attn) + len(self.mlp)} sub-layers, up to {self.draft_length} in one pass"


class S3DDrafter:
    """It remembers nothing, so it is its own session."""

    def __init__(self, draft: Simultaneous):
        self.simultaneous = draft

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return self

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        rows = min(most, self.simultaneous.most)
        plan = ctx.planner.chain(ctx.cache.length, rows)
        states = self.simultaneous.states(ctx.pending, rows, ctx.cache, plan)
        tokens, q = ctx.picker.draw(ctx.picker.score(self.simultaneous.model.head(states)[0], False))
        return Draft(tokens[:, 0], q)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        pass
