"""Draft several tokens, or a tree of them, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.reduced_session import draft_with
from skipsearch.drafters.s3d.spec import S3D, DraftTree
from skipsearch.drafters.s3d.weights import MultiTokenDraft, load_multi_token
from skipsearch.errors import ModuleError
from skipsearch.models.adapter import ModelAdapter


def make_s3d_drafter(spec: S3D, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
    """Make the drafter from the file of trained weights that these settings name.

    Raises: ModuleError if the file is missing, damaged, or made for another model or mask;
    MaskError for a token outside the vocabulary.
    """
    multi_token_draft = load_multi_token(model, spec.module, folders)
    if multi_token_draft.mask != spec.mask(model.spec.n_layers):
        raise ModuleError(
            f"{spec.module.file}: this module was trained for another mask than the recipe has"
        )
    drafter = S3DDrafter(multi_token_draft, spec.tree)
    return draft_with(drafter, multi_token_draft.model, spec.reading)


class S3DDrafter(DraftSession):
    """A drafter that has no state and therefore serves as the session of all requests.

    The model of its context is the one that drafts.
    """

    def __init__(self, multi_token_draft: MultiTokenDraft, tree: DraftTree | None = None):
        self.multi_token_draft, self.tree = multi_token_draft, tree

    def new_session(self) -> S3DDrafter:
        return self

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        n_rows = min(max_tokens, self.multi_token_draft.max_tokens)
        plan = ctx.planner.plan_chain(ctx.cache.length, n_rows)
        hidden = self.multi_token_draft.run_draft_layers(ctx.pending, n_rows, ctx.cache, plan)
        logits = ctx.model.head(hidden)[0]
        sampler = ctx.sampler if self.tree is None else ctx.sampler.top(1 + max(self.tree.ranks))
        ranked, probs = sampler.draw(sampler.score(logits, False))  # [rows, ranks]
        if self.tree is None:
            return Draft(ranked[:, 0], probs)
        return build_tree_draft(self.tree, ranked, probs)


def build_tree_draft(tree: DraftTree, ranked_tokens: Tensor, probs: Tensor | None) -> Draft:
    """Return the draft of a tree. Nodes for which the draft pass has no token are left out.

    ranked_tokens: the tokens of each row by rank, [rows, ranks]. probs: the distribution of each
    row, [rows, V]; None: greedy.
    """
    new_number = {0: 0}  # node of the tree -> node of the draft
    parents, rows, ranks = list[int](), list[int](), list[int]()
    for node, (parent, rank, depth) in enumerate(
        zip(tree.parents, tree.ranks, tree.depths, strict=True), 1
    ):
        row = depth - 1
        # The draft may have fewer rows than the tree is deep, and sampling may have drawn fewer
        # tokens.
        if (
            parent not in new_number
            or row >= len(ranked_tokens)
            or (probs is not None and not float(probs[row, ranked_tokens[row, rank]]))
        ):
            continue
        new_number[node] = len(new_number)
        parents.append(new_number[parent])
        rows.append(row)
        ranks.append(rank)
    tokens, n_main = ranked_tokens[rows, ranks], min(tree.n_main, len(ranked_tokens))
    if len(rows) == n_main:
        return Draft(tokens, None if probs is None else probs[:n_main])
    return Draft(
        tokens,
        None if probs is None else probs[torch.tensor(rows, device=probs.device)],
        parents=tuple(parents),
        n_main=n_main,
    )
