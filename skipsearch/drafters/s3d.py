"""`s3d`: one pass of the thinned model drafts several tokens at once, from trained embeddings of what it does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.skip import ascending
from skipsearch.fields import Layers, ModuleRef, Part, broken_rule, is_none
from skipsearch.mask import SkipMask, sublayers
from skipsearch.recipe import About, DrafterSpec

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.models.spec import ModelAdapter
    from skipsearch.modules.s3d import Simultaneous

Rank = Annotated[int, Field(ge=0, le=4)]


class Tree(Part):
    """What is verified of one draft pass: nodes 1, 2, …, each below an earlier one or below the pending token, which is 0.

    A node at depth k is a choice of row k: of rank 0 its first, of rank 1 what it would choose if that were ruled out. The first nodes are
    the trunk: rank 0 below rank 0. Below a node stand ranks 0, 1, … without a gap, as they are drawn one after another.
    """

    parents: Annotated[tuple[int, ...], Field(min_length=1, max_length=64)] = Field(description="the node that each node follows, 0 the "
                                                                                                "pending token")
    ranks: tuple[Rank, ...] = Field(description="which choice of its row each node is, 0 the first")

    @model_validator(mode="after")
    def _is_one(self) -> Tree:
        if len(self.ranks) != len(self.parents):
            raise broken_rule("ranks", "one for each of the parents")
        below: dict[int, list[int]] = {}
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True), 1):
            if not 0 <= parent < node:
                raise broken_rule("parents", f"node {node} cannot follow node {parent}: parents stand before their children, from 0 on")
            if rank != len(below.setdefault(parent, [])):
                raise broken_rule("ranks", f"node {node} has rank {rank}, and the next one below node {parent} is {len(below[parent])}")
            below[parent].append(node)
        if (self.trunk, 0) in self._pairs:
            raise broken_rule("parents", "the trunk, which is rank 0 below rank 0, stands before all other nodes")
        return self

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.parents, self.ranks, strict=True))

    @property
    def trunk(self) -> int:
        """Nodes of the trunk."""
        return next((n for n, pair in enumerate(self._pairs) if pair != (n, 0)), len(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each node, from 1."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found[1:])


class S3D(DrafterSpec):
    """Every row of the draft pass but the first stands for a token that nobody knows, so its tokens do not depend on each other, and the
    round costs one draft pass whatever its length. Source: S3D (Zhong & Bharadwaj 2024), section 3.
    """

    kind: Literal["s3d"] = "s3d"
    about = About("S3D (Zhong & Bharadwaj 2024)", "embeddings and changes that `train s3d` makes", "lookup before it; a tree of candidates")
    attn: Layers = Field(description="layers whose attention the draft skips, 0..n_layers-1, ascending")
    mlp: Layers = Field(description="layers whose MLP the draft skips, 0..n_layers-1, ascending")
    tree: Tree | None = Field(default=None, exclude_if=is_none, description="what of the draft pass is verified; left out: a chain")
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
        return S3DDrafter(found, self.tree)

    def mask(self, n_layers: int) -> SkipMask:
        return SkipMask(n_layers, self.attn, self.mlp)

    @property
    def scratch(self) -> int:
        return len(self.tree.parents) if self.tree else 0

    def __str__(self) -> str:
        shape = f", a tree of {len(self.tree.parents)}" if self.tree else ""
        return f"s3d, skips {sublayers(len(self.attn) + len(self.mlp))}, up to {self.draft_length} in one pass{shape}"


class S3DDrafter:
    """It remembers nothing, so it is its own session."""

    def __init__(self, draft: Simultaneous, tree: Tree | None = None):
        self.simultaneous, self.tree = draft, tree

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return self

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        rows = min(most, self.simultaneous.most)
        plan = ctx.planner.chain(ctx.cache.length, rows)
        states = self.simultaneous.states(ctx.pending, rows, ctx.cache, plan)
        picker = ctx.picker if self.tree is None else ctx.picker.ranked(1 + max(self.tree.ranks))
        ranked, q = picker.draw(picker.score(self.simultaneous.model.head(states)[0], False))   # [rows, ranks]
        return Draft(ranked[:, 0], q) if self.tree is None else as_tree(self.tree, ranked, q)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        pass


def as_tree(tree: Tree, ranked: Tensor, probs: Tensor | None) -> Draft:
    """As much of a tree as there are rows. ranked: [rows, ranks]; probs: [rows, V] or None, what they were drawn from."""
    import torch

    place = {0: 0}   # of the nodes that are proposed, the number that they have there
    parents, rows, ranks = list[int](), list[int](), list[int]()
    for node, (parent, rank, depth) in enumerate(zip(tree.parents, tree.ranks, tree.depths, strict=True), 1):
        if parent not in place or depth > len(ranked) or (probs is not None and not float(probs[depth - 1, ranked[depth - 1, rank]])):
            continue   # no row is left for it, or less could be drawn than was asked for
        place[node] = len(place)
        parents.append(place[parent])
        rows.append(depth - 1)
        ranks.append(rank)
    tokens, trunk = ranked[rows, ranks], min(tree.trunk, len(ranked))
    if len(rows) == trunk:
        return Draft(tokens, None if probs is None else probs[:trunk])
    return Draft(tokens, None if probs is None else probs[torch.tensor(rows, device=probs.device)], parents=tuple(parents), trunk=trunk)
