"""Draft with a head that reads the last hidden state and the next token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass
class HeadText:
    """What a draft head has read of the text in a cache of the full model, with which it stays.

    A row of the head reads the hidden state of a token and the token after it.
    """

    cache: KVCache  # the K/V of the rows
    row_ends: list[int] = field(default_factory=list)  # first tokens of the text that a row reads
    # Hidden states that are not read yet: (position of the first token, [1, tokens, H]).
    unread: list[tuple[int, Tensor]] = field(default_factory=list)

    def keep(self, n_tokens: int) -> None:
        """Forget everything that depends on tokens of the text after the first `n_tokens`."""
        del self.row_ends[bisect_right(self.row_ends, n_tokens) :]
        parts = ((first, hidden[:, : n_tokens - first]) for first, hidden in self.unread)
        self.unread = [(first, hidden) for first, hidden in parts if first < n_tokens]

    @property
    def nbytes(self) -> int:
        states = sum(hidden.numel() * hidden.element_size() for _, hidden in self.unread)
        return self.cache.nbytes + states

    def reset(self) -> None:
        self.keep(0)
        self.cache.reset()

    def shrink(self, slots: int) -> None:
        del self.row_ends[slots:]
        self.cache.shrink(slots)


class MtpDrafter:
    """A drafter that runs a draft head. The model of its context is the head's adapter."""

    def __init__(self, head: DraftHead, exit_policy: Exit, siblings: Siblings | None = None):
        self.head, self.exit, self.siblings = head, SharedExit(exit_policy), siblings

    def new_session(self) -> MtpSession:
        return MtpSession(self.head, self.exit, self.siblings)


class MtpSession(TokenwiseSession):
    """A session that drafts one request with a draft head.

    Hidden states of committed tokens are captured from the prefill and from verify passes,
    whichever drafter drafted them. The head reads them at the next draft, and then writes over the
    K/V that an earlier draft left in these slots. What it has read of a text is used again by the
    next request that begins with this text.
    """

    observes_hidden = observes_last_hidden_only = True
    text: HeadText

    def __init__(self, head: DraftHead, exit_policy: SharedExit, siblings: Siblings | None):
        super().__init__(exit_policy, siblings)
        self.head = head
        self._tapped: list[Tensor] = []  # [1, rows, H], of the current pass

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        return LayerInputTap(model.spec.n_layers, n_rows, self._tapped)

    def begin(self, ctx: DecodeContext) -> None:
        tapped, text = self._take_tapped(), ctx.cache.companions.get(self.head)
        if not isinstance(text, HeadText):
            text = HeadText(self.head.new_cache(ctx.cache.capacity))
            ctx.cache.companions[self.head] = text
        text.keep(ctx.cache.length - tapped.shape[1])
        self.text = text
        self._add_unread(ctx, tapped)

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        self._add_unread(ctx, self._take_tapped()[:, [0, *accepted_rows]])

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        hidden, following, plan = self._take_unread(ctx)
        n_rows, cache, state = len(self.text.row_ends), self.text.cache, hidden

        def score_token(
            token: Tensor, n: int, sampler: TokenSampler, with_confidence: bool
        ) -> DraftScores:
            nonlocal state
            if n == 0:
                state = self.head.run(hidden, following, cache, plan)[:, -1:]
            else:
                step = ctx.planner.plan_chain(n_rows + n - 1, 1)
                state = self.head.run(state, token, cache, step)
            logits = self.head.compute_logits(ctx.model, state)[:, -1]
            return sampler.score(logits, with_confidence)

        def score_chain(sampler: TokenSampler, threshold: float) -> DraftScores | None:
            if self.head.runner is None:
                return None
            return self.head.runner.run_chain(
                ctx.model, hidden, following, cache, plan, sampler, max_tokens, threshold
            )

        return self._draft_tokens(ctx, max_tokens, score_token, score_chain)

    def _take_unread(self, ctx: DecodeContext) -> tuple[Tensor, Tensor, PassPlan]:
        """Return the rows that the head has not read, and count them as read.

        Returns: hidden states [1, R, H], the token after each [1, R], and the plan of their pass.
        The rows of tokens whose hidden states no pass has shown are missing: those of K/V that
        another process computed.
        """
        text, unread = self.text, self.text.unread
        hidden = torch.cat([states for _, states in unread], dim=1)
        ends = [first + i + 2 for first, states in unread for i in range(states.shape[1])]
        plan = ctx.planner.plan_chain(len(text.row_ends), len(ends))
        text.row_ends += ends
        text.unread = []
        following = [ctx.history[end - 1] for end in ends]
        return hidden, ctx.pending.new_tensor([following]), plan

    def _add_unread(self, ctx: DecodeContext, hidden: Tensor) -> None:
        """Add the hidden states of the last committed tokens, [1, R, H]."""
        self.text.unread.append((ctx.cache.length - hidden.shape[1], hidden))

    def _take_tapped(self) -> Tensor:
        """Return what the head reads of the latest pass, [1, rows, H], and forget the pass."""
        tapped, self._tapped = self._tapped, []
        return self.head.read_states(torch.cat(tapped, dim=1))
