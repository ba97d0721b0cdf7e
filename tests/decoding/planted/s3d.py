"""Bugs of s3d."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import loop
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.reduced_session import ReducedDrafter
from skipsearch.drafters.s3d import session
from skipsearch.drafters.s3d.session import S3DDrafter
from skipsearch.drafters.s3d.weights import MultiTokenDraft

from ..s3d_checks import (
    check_s3d_drafts,
    check_s3d_names_tokens,
    check_s3d_tree_sampling,
    check_s3d_trees,
)
from ..trained_checks import check_enumerated, check_s3d_committed
from .register import caught_by, planted


def check_s3d_law() -> None:
    check_enumerated(["s3d"])


@planted(check_s3d_drafts, loop.DecodeLoop, "_run_full_model")
def changes_for_drafting_verify(real, self, *arguments, **options):
    """The low-rank updates are added to the model itself, so that verification uses them too."""
    inner = [getattr(drafter, "inner", None) for _, drafter in self.drafters]
    changed = next(
        (drafter.reduced_model.model for drafter in inner if isinstance(drafter, ReducedDrafter)),
        self.model,
    )
    with patch.object(self, "model", changed):
        return real(self, *arguments, **options)


@planted(check_s3d_drafts, MultiTokenDraft, "run_draft_layers")
def embeddings_of_the_wrong_depth(real, self, *arguments):
    with patch.object(self, "mask_embeddings", self.mask_embeddings.roll(1, 0)):
        return real(self, *arguments)


@caught_by(check_s3d_trees)
def nodes_of_a_tree_take_the_row_of_their_parent() -> Iterator[None]:
    real = session.build_tree_draft
    with patch.object(
        session,
        "build_tree_draft",
        lambda tree, ranked, probs: real(tree, torch.cat([ranked[:1], ranked[:-1]]), probs),
    ):
        yield


@planted(check_s3d_tree_sampling, session, "build_tree_draft")
def nodes_of_a_tree_carry_the_distribution_of_another_depth(real, tree, ranked, probs):
    found = real(tree, ranked, probs)
    return replace(found, probs=found.probs.flip(0))


@planted(check_s3d_law, S3DDrafter, "draft")
def rows_carry_the_distribution_of_another_depth(real, self, ctx, most):
    """The tokens are right, but the acceptance rule uses the q of another row."""
    found = real(self, ctx, most)
    return (
        found if found is None or found.probs is None else replace(found, probs=found.probs.flip(0))
    )


@caught_by(check_s3d_names_tokens)
def unknown_tokens_join_the_vocabulary() -> Iterator[None]:
    """A head that shares its matrix with the embedding grows with it.

    So a draft may contain the marker of an unknown token.
    """
    real = S3DDrafter.draft

    class Grown:
        def __init__(self, draft: MultiTokenDraft):
            self.inner, self.unknown = draft.model, draft.mask_embeddings

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def head(self, h: Tensor) -> Tensor:
            return torch.cat([self.inner.head(h), h @ self.unknown.T], dim=-1)

    def draft(self: S3DDrafter, ctx: DecodeContext, most: int) -> Draft | None:
        return real(self, replace(ctx, model=Grown(self.multi_token_draft)), most)

    with patch.object(S3DDrafter, "draft", draft):
        yield


@caught_by(check_s3d_committed)
def kv_of_unknown_tokens_are_committed() -> Iterator[None]:
    """The draft pass's K/V of unknown tokens replace those of the verify pass."""
    real, wrote = S3DDrafter.draft, list[tuple[Tensor, int, Tensor]]()

    def draft(self: S3DDrafter, ctx: DecodeContext, most: int) -> Draft | None:
        found, start = real(self, ctx, most), ctx.cache.length
        end = start + min(most, self.multi_token_draft.max_tokens)
        buffers = [buffer for buffer in (*ctx.cache.keys, *ctx.cache.values) if buffer is not None]
        wrote[:] = [(buffer, start, buffer[:, :, start:end].clone()) for buffer in buffers]
        return found

    def verified(self: S3DDrafter, ctx: DecodeContext, path: Sequence[int]) -> None:
        for buffer, start, rows in wrote:
            known = min(1 + len(path), rows.shape[2])
            buffer[:, :, start + 1 : start + known] = rows[:, :, 1:known]

    with patch.object(S3DDrafter, "draft", draft), patch.object(S3DDrafter, "verified", verified):
        yield
