"""Draft with a head that reads the last hidden state and the next token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Siblings
from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.draft_model_session import draft_with
from skipsearch.drafters.exits import Exit, ThresholdExitSession
from skipsearch.drafters.mtp.shipped import load_head_of
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.mtp.weights import DraftHead, load_draft_head
from skipsearch.drafters.skip.session import SharedExit, build_chain_draft, build_draft
from skipsearch.engine import LayerInputTap, LayerTap
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan


def make_mtp_drafter(spec: Mtp, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
    """Make the drafter from the file of trained weights that these settings name.

    If they name none, it drafts with the head that the model ships.
    Raises: ModuleError if the file is missing, damaged, or made for another model, or if the model
    ships no head; ModelError if the engine has no head in fewer bits; MaskError for a token outside
    the vocabulary.
    """
    ref = spec.module
    head = load_head_of(model) if ref is None else load_draft_head(model, ref, folders)
    head = head.rounded(spec.weights)
    drafter = MtpDrafter(head, spec.exit, spec.siblings)
    return draft_with(drafter, head.adapter, Reading(vocabulary=spec.vocabulary))


class MtpDrafter:
    """A drafter that runs a draft head. The model of its context is the head's adapter."""

    def __init__(self, head: DraftHead, exit_policy: Exit, siblings: Siblings | None = None):
        self.head, self.exit, self.siblings = head, SharedExit(exit_policy), siblings

    def new_session(self) -> MtpSession:
        reads_confidence = self.exit.policy.reads_confidence
        return MtpSession(self.head, self.exit.begin(), reads_confidence, self.siblings)


class MtpSession(DraftSession):
    """A session that drafts one request, with a cache of its own for the head's K/V.

    Row i of the head reads the hidden state of token i and token i + 1, and is in slot i. Hidden
    states of committed tokens are captured from the prefill and from verify passes, whichever
    drafter drafted them. The head reads them at the next draft, and then writes over the K/V that
    an earlier draft left in these slots.
    """

    observes_hidden = observes_last_hidden_only = True
    cache: KVCache

    def __init__(
        self, head: DraftHead, exit_session: Any, reads_confidence: bool, siblings: Siblings | None
    ):
        self.head, self.exit = head, exit_session
        self.reads_confidence, self.siblings = reads_confidence, siblings
        self._tapped: list[Tensor] = []  # [1, rows, H], of the current pass
        self._unread: list[Tensor] = []  # [1, rows, H], of committed tokens after those in `cache`
        self._n_read = 0  # slots of `cache` with the rows of committed tokens
        self._has_threshold = isinstance(exit_session, ThresholdExitSession)
        self._n_drafted = 0

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        return LayerInputTap(model.spec.n_layers, n_rows, self._tapped)

    def begin(self, ctx: DecodeContext) -> None:
        self.cache = self.head.new_cache(ctx.cache.capacity)
        self._unread = [self._take_tapped()]

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        self._unread.append(self._take_tapped()[:, [0, *accepted_rows]])

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        sampler = ctx.sampler if self.siblings is None else ctx.sampler.top(1 + self.siblings.most)
        reads_confidence = self.reads_confidence or self.siblings is not None
        hidden, following, plan = self._take_committed(ctx)
        threshold = self.exit.current_threshold() if self._has_threshold else None
        if threshold is not None and self.head.runner is not None:
            scores = self.head.runner.run_chain(
                ctx.model, hidden, following, self.cache, plan, sampler, max_tokens, threshold
            )
            if scores is not None:
                draft = build_chain_draft(scores, self.siblings)
                self._n_drafted = len(draft.main_path().tokens)
                return draft
        tokens, probs, n_siblings = list[Tensor](), list[Tensor](), list[int]()
        hidden = self.head.run(hidden, following, self.cache, plan)[:, -1:]
        for n in range(max_tokens):
            logits = self.head.compute_logits(ctx.model, hidden)[:, -1]
            scores = sampler.score(logits, reads_confidence)
            ranked, q = sampler.draw(scores)  # [1, 1 + siblings]
            tokens.append(ranked)
            n_siblings.append(0)
            if q is not None:
                probs.append(q)
            if scores.confidence is not None:
                confidence = float(scores.confidence)
                if self.siblings is not None:
                    n_siblings[-1] = self.siblings.count_for(confidence)
                if self.reads_confidence and self.exit.should_stop(confidence, n + 1):
                    break
            if n + 1 < max_tokens:
                plan = ctx.planner.plan_chain(self._n_read + n, 1)
                hidden = self.head.run(hidden, ranked[:, :1], self.cache, plan)
        self._n_drafted = len(tokens)
        return build_draft(torch.cat(tokens), torch.cat(probs) if probs else None, n_siblings)

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        n_accepted = sum(node <= self._n_drafted for node in accepted_nodes)
        self.exit.observe(n_accepted, self._n_drafted)

    def _take_committed(self, ctx: DecodeContext) -> tuple[Tensor, Tensor, PassPlan]:
        """Return the rows of committed tokens that the head has not read, and count them as read.

        Returns: hidden states [1, R, H], the token after each [1, R], and the plan of their pass.
        If earlier tokens were in the model's cache already, no pass showed their hidden states, and
        the head's text begins after them.
        """
        hidden, self._unread = torch.cat(self._unread, dim=1), []
        n_rows = hidden.shape[1]
        plan = ctx.planner.plan_chain(self._n_read, n_rows)
        self._n_read += n_rows
        return hidden, ctx.pending.new_tensor([ctx.history[-n_rows:]]), plan

    def _take_tapped(self) -> Tensor:
        """Return what the head reads of the latest pass, [1, rows, H], and forget the pass."""
        tapped, self._tapped = self._tapped, []
        return self.head.read_states(torch.cat(tapped, dim=1))
