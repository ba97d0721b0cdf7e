"""`s3d`: one pass drafts several tokens in parallel, with trained embeddings of unknown tokens.

The paper calls such embeddings mask tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from skipsearch.core.mask import SkipMask, format_sublayer_count
from skipsearch.core.recipe import DrafterInfo, DrafterSpec, DraftVocabulary
from skipsearch.core.schema_types import FrozenModel, ModuleRef, SkippedLayers, broken_rule, is_none
from skipsearch.drafters.base import list_depths

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter

Rank = Annotated[int, Field(ge=0, le=4)]


class DraftTree(FrozenModel):
    """The tree that is verified after one draft pass.

    Nodes are counted from 1. The parent of a node is an earlier node or the pending token, which is
    0. A node at depth k is a token of row k: rank 0 is the row's first choice, rank 1 its choice
    without the first, and so on. The main path comes first and has rank 0. The children of a node
    have the ranks 0, 1, … without a gap, because they are drawn in order.
    """

    # Not strict: YAML and JSON have lists, not tuples.
    parents: Annotated[tuple[int, ...], Field(strict=False, min_length=1, max_length=64)] = Field(
        description="the node that each node follows, 0 the pending token"
    )
    ranks: Annotated[tuple[Rank, ...], Field(strict=False)] = Field(
        description="which choice of its row each node is, 0 the first"
    )

    @model_validator(mode="after")
    def _check_shape(self) -> DraftTree:
        if len(self.ranks) != len(self.parents):
            raise broken_rule("ranks", "one for each of the parents")
        children: dict[int, list[int]] = {}
        for node, (parent, rank) in enumerate(self._pairs, 1):
            if not 0 <= parent < node:
                raise broken_rule(
                    "parents",
                    f"node {node} cannot follow node {parent}: parents stand before their "
                    "children, from 0 on",
                )
            if rank != len(children.setdefault(parent, [])):
                raise broken_rule(
                    "ranks",
                    f"node {node} has rank {rank}, and the next one below node {parent} is "
                    f"{len(children[parent])}",
                )
            children[parent].append(node)
        if (self.n_main, 0) in self._pairs:
            raise broken_rule(
                "parents", "the trunk, which is rank 0 below rank 0, stands before all other nodes"
            )
        return self

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.parents, self.ranks, strict=True))

    @property
    def n_main(self) -> int:
        """Length of the main path."""
        return next((n for n, pair in enumerate(self._pairs) if pair != (n, 0)), len(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, from 1."""
        return list_depths(self.parents)


class S3D(DrafterSpec):
    """Drafts several tokens in one pass.

    All rows of the draft pass but the first are for tokens that are not known yet. The drafted
    tokens therefore do not depend on each other, and a round has one draft pass for any draft
    length. Source: S3D (Zhong & Bharadwaj 2024), section 3.
    """

    kind: Literal["s3d"] = "s3d"
    info = DrafterInfo(
        "S3D (Zhong & Bharadwaj 2024)",
        "embeddings and changes that `train s3d` makes",
        "lookup before it; a tree of candidates",
    )
    attn: SkippedLayers = Field(
        description="layers whose attention the draft skips, 0..n_layers-1, ascending"
    )
    mlp: SkippedLayers = Field(
        description="layers whose MLP the draft skips, 0..n_layers-1, ascending"
    )
    tree: DraftTree | None = Field(
        default=None,
        exclude_if=is_none,
        description="what of the draft pass is verified; left out: a chain",
    )
    vocabulary: DraftVocabulary = None
    module: ModuleRef = Field(description="the trained embeddings and, if any, low-rank changes")

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.s3d.session import make_s3d_drafter

        return make_s3d_drafter(self, model, module_folders)

    def mask(self, n_layers: int) -> SkipMask:
        return SkipMask(n_layers, self.attn, self.mlp)

    @property
    def scratch_slots(self) -> int:
        return len(self.tree.parents) if self.tree else 0

    def __str__(self) -> str:
        skipped = format_sublayer_count(len(self.attn) + len(self.mlp))
        shape = f", a tree of {len(self.tree.parents)}" if self.tree else ""
        return (
            f"s3d, skips {skipped}{self.format_reading()}, up to {self.draft_length} in one "
            f"pass{shape}"
        )
