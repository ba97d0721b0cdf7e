"""Draft with a head that reads the last hidden state and the next token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Siblings
from skipsearch.drafters.base import DecodeContext, Draft, Drafter
from skipsearch.drafters.exits import Exit
from skipsearch.drafters.mtp.shipped import load_head_of
from skipsearch.drafters.mtp.spec import Mtp
from skipsearch.drafters.mtp.weights import DraftHead, load_draft_head
from skipsearch.drafters.reduced_session import draft_with
from skipsearch.drafters.skip.session import SharedExit, TokenwiseSession
from skipsearch.engine import LayerInputTap, LayerTap
from skipsearch.engine.sampler import TokenSampler
from skipsearch.models.adapter import DraftScores, ModelAdapter
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
        return MtpSession(self.head, self.exit, self.siblings)


class MtpSession(TokenwiseSession):
    """A session that drafts one request, with a cache of its own for the head's K/V.

    Row i of the head reads the hidden state of token i and token i + 1, and is in slot i. Hidden
    states of committed tokens are captured from the prefill and from verify passes, whichever
    drafter drafted them. The head reads them at the next draft, and then writes over the K/V that
    an earlier draft left in these slots.
    """

    observes_hidden = observes_last_hidden_only = True
    cache: KVCache

    def __init__(self, head: DraftHead, exit_policy: SharedExit, siblings: Siblings | None):
        super().__init__(exit_policy, siblings)
        self.head = head
        self._tapped: list[Tensor] = []  # [1, rows, H], of the current pass
        self._unread: list[Tensor] = []  # [1, rows, H], of committed tokens after those in `cache`
        self._n_read = 0  # slots of `cache` with the rows of committed tokens

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
        hidden, following, plan = self._take_committed(ctx)
        state = hidden

        def score_token(
            token: Tensor, n: int, sampler: TokenSampler, with_confidence: bool
        ) -> DraftScores:
            nonlocal state
            if n == 0:
                state = self.head.run(hidden, following, self.cache, plan)[:, -1:]
            else:
                step = ctx.planner.plan_chain(self._n_read + n - 1, 1)
                state = self.head.run(state, token, self.cache, step)
            logits = self.head.compute_logits(ctx.model, state)[:, -1]
            return sampler.score(logits, with_confidence)

        def score_chain(sampler: TokenSampler, threshold: float) -> DraftScores | None:
            if self.head.runner is None:
                return None
            return self.head.runner.run_chain(
                ctx.model, hidden, following, self.cache, plan, sampler, max_tokens, threshold
            )

        return self._draft_tokens(ctx, max_tokens, score_token, score_chain)

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
