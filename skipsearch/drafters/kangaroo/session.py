"""Draft with the model's first layers and a trained adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.core.recipe import Siblings
from skipsearch.drafters.base import DecodeContext, Draft, Drafter, PartialPass
from skipsearch.drafters.exits import Exit
from skipsearch.drafters.kangaroo.spec import Kangaroo
from skipsearch.drafters.kangaroo.weights import EarlyExitDraft, load_early_exit
from skipsearch.drafters.reduced_session import draft_with
from skipsearch.drafters.skip.session import SharedExit, TokenwiseSession
from skipsearch.engine import LayerInputTap, LayerTap, can_start_midway
from skipsearch.engine.sampler import TokenSampler
from skipsearch.errors import ModuleError
from skipsearch.models.adapter import DraftScores, ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan


def make_kangaroo_drafter(spec: Kangaroo, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
    """Make the drafter from the file of trained weights that these settings name.

    Raises: MaskError if the model has no such exit layer, or for a token outside the vocabulary;
    ModuleError if the file is missing, damaged, or made for another model or exit.
    """
    spec.mask(model.spec.n_layers)
    early_exit_draft = load_early_exit(model, spec.module, folders)
    if early_exit_draft.exit_layer != spec.exit_layer:
        raise ModuleError(
            f"{spec.module.file}: this adapter was trained for layer "
            f"{early_exit_draft.exit_layer}, and the recipe leaves the model "
            f"at layer {spec.exit_layer}"
        )
    drafter = KangarooDrafter(early_exit_draft, spec.exit, spec.siblings, can_start_midway(model))
    return draft_with(drafter, early_exit_draft.adapter, spec.reading)


class KangarooDrafter:
    """A drafter that runs the model up to an early layer, then an adapter.

    The model of its context is the adapter.

    resumes: verify drafts from the exit layer on, because the draft has run the layers below it. An
    engine that can only run whole passes verifies from layer 0.
    """

    def __init__(
        self,
        early_exit_draft: EarlyExitDraft,
        exit_policy: Exit,
        siblings: Siblings | None = None,
        resumes: bool = False,
    ):
        self.early_exit_draft, self.exit = early_exit_draft, SharedExit(exit_policy)
        self.siblings, self.resumes = siblings, resumes

    def new_session(self) -> KangarooSession:
        session_class = ResumingSession if self.resumes else KangarooSession
        return session_class(self.early_exit_draft, self.exit, self.siblings)


class KangarooSession(TokenwiseSession):
    """A session that drafts with a separate cache. Verification begins at layer 0.

    The cache holds the K/V of the adapter and of the layers below the exit, with a slot for each
    token. The K/V of accepted tokens stay; those of rejected tokens are overwritten.
    """

    cache: KVCache

    def __init__(
        self, early_exit_draft: EarlyExitDraft, exit_policy: SharedExit, siblings: Siblings | None
    ):
        super().__init__(exit_policy, siblings)
        self.early_exit_draft = early_exit_draft
        self.n_in_cache = 0  # tokens of the text whose K/V are in the cache
        self._round_start = 0

    def begin(self, ctx: DecodeContext) -> None:
        self.cache = self.early_exit_draft.new_cache(ctx.cache.capacity)

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        start = len(ctx.history) - 1
        exit_hidden = list[Tensor]()

        def score_token(
            token: Tensor, n: int, sampler: TokenSampler, with_confidence: bool
        ) -> DraftScores:
            features = (
                self._compute_features(token, ctx, start + n) if n else self._pending_features(ctx)
            )
            exit_hidden.append(features[:, -1:])
            n_rows = features.shape[1]
            plan = ctx.planner.plan_chain(start + n + 1 - n_rows, n_rows)
            logits = self.early_exit_draft.compute_last_logits(
                ctx.model, features, self.cache, plan
            )
            return sampler.score(logits, with_confidence)

        draft = self._draft_tokens(ctx, max_tokens, score_token)
        # `verified` adds the accepted draft tokens to `n_in_cache`.
        self._round_start = self.n_in_cache = start
        return self._attach_partial_pass(draft, torch.cat(exit_hidden, dim=1))

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        super().verified(ctx, accepted_nodes)
        # The adapter has read neither the siblings nor the last draft token.
        n_read = sum(node < self._n_drafted for node in accepted_nodes)
        self.n_in_cache = self._round_start + 1 + n_read

    def _pending_features(self, ctx: DecodeContext) -> Tensor:
        """Return the adapter's input [1, R, H] at the R tokens that the adapter has not read yet.

        The last of them is the pending token.
        """
        unread = ctx.pending.new_tensor([ctx.history[self.n_in_cache :]])
        return self.early_exit_draft.compute_features(
            unread, self.cache, ctx.planner.plan_chain(self.n_in_cache, unread.shape[1])
        )

    def _compute_features(self, token: Tensor, ctx: DecodeContext, slot: int) -> Tensor:
        """Run a token [1, 1] up to the exit; return the adapter's input, [1, 1, H]."""
        return self.early_exit_draft.compute_features(
            token, self.cache, ctx.planner.plan_chain(slot, 1)
        )

    def _attach_partial_pass(self, draft: Draft, exit_hidden: Tensor) -> Draft:
        return draft


class ResumingSession(KangarooSession):
    """A session that drafts with the model's cache. Verification begins at the exit layer.

    A separate cache holds the adapter's K/V alone. The layers below the exit write to the slots
    after the committed ones, and verification uses these K/V. If other drafters proposed tokens,
    the adapter's input at these tokens is captured from the verify passes.
    """

    observes_hidden = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._tapped: list[Tensor] = []  # [1, rows, H] at the exit layer, of the current pass
        # at the exit layer, of committed tokens that the adapter has not read
        self._unread_features: list[Tensor] = []

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        return LayerInputTap(self.early_exit_draft.exit_layer, n_rows, self._tapped)

    def begin(self, ctx: DecodeContext) -> None:
        super().begin(ctx)
        features = torch.cat(self._tapped, dim=1)
        # Tokens of an earlier request of the session, whose K/V were in the cache: no pass showed
        # them.
        n_before = ctx.prompt_length - features.shape[1]
        if n_before:
            earlier = self.early_exit_draft.compute_features(
                ctx.pending.new_tensor([ctx.history[:n_before]]),
                self.cache,
                ctx.planner.plan_chain(0, n_before),
            )
            features = torch.cat([earlier, features], dim=1)
        self.early_exit_draft.run_adapter(
            features, self.cache, ctx.planner.plan_chain(0, ctx.prompt_length)
        )
        self._tapped = []

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        features = torch.cat(self._tapped, dim=1)[:, [0, *accepted_rows]]
        start = ctx.cache.length - features.shape[1]
        self._unread_features.append(features[:, max(0, self.n_in_cache - start) :])
        self._tapped = []

    def _pending_features(self, ctx: DecodeContext) -> Tensor:
        unread, self._unread_features = self._unread_features, []
        pending = self._compute_features(ctx.pending, ctx, ctx.cache.length)
        return torch.cat([*unread, pending], dim=1)

    def _compute_features(self, token: Tensor, ctx: DecodeContext, slot: int) -> Tensor:
        return self.early_exit_draft.compute_features(
            token, ctx.cache, ctx.planner.plan_chain(slot, 1)
        )

    def _attach_partial_pass(self, draft: Draft, exit_hidden: Tensor) -> Draft:
        return replace(
            draft, partial_pass=PartialPass(exit_hidden, self.early_exit_draft.exit_layer)
        )
