"""Draft with a second model, which keeps the text in a cache of its own.

The inner session is that of `skip`: to it, the draft model is a model under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from skipsearch.core.reading import Reading
from skipsearch.core.sequences import common_prefix_length
from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.draft_model.loaded_models import find_draft_model
from skipsearch.drafters.draft_model.shared_tokens import SharedTokens, match_tokens
from skipsearch.drafters.draft_model.spec import DraftModel
from skipsearch.drafters.reduced_session import reduce_reading
from skipsearch.drafters.skip.session import SkipDrafter
from skipsearch.engine import forward
from skipsearch.errors import ModelError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, round_slots


def make_draft_model_drafter(spec: DraftModel, model: ModelAdapter) -> DraftModelDrafter:
    """Make the drafter of these settings for a full model. Raises: as `DraftModel.build`."""
    draft_model = find_draft_model(spec.model, model)
    if draft_model is None:
        raise ModelError(
            f"the draft model {spec.model.id} is not loaded on {model.spec.device}: a decoder of "
            "its profile loads it, and `refer_to_draft_model` names one in memory"
        )
    tokens = match_tokens(draft_model, model)
    vocabulary = tokens.to_own_vocabulary(spec.vocabulary)
    inner = reduce_reading(
        SkipDrafter(spec.own_mask, spec.exit, spec.siblings),
        draft_model,
        Reading(spec.weights, vocabulary),
    )
    return DraftModelDrafter(draft_model, inner, tokens, vocabulary is not None)


@dataclass
class ReadText:
    """The tokens that a draft model has read, by the full model's ids, and their K/V by slot."""

    cache: KVCache
    tokens: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def reset(self) -> None:
        self.cache.reset()
        self.tokens = []

    def shrink(self, slots: int) -> None:
        del self.tokens[slots:]
        self.cache.shrink(slots)


class DraftModelDrafter:
    """A drafter that runs a drafter on a second model.

    inner: the drafter of the draft model, whose tokens it names by its own ids. has_vocabulary:
    whether it scores a part of the tokens alone.
    """

    def __init__(
        self, draft_model: ModelAdapter, inner: Drafter, tokens: SharedTokens, has_vocabulary: bool
    ):
        self.draft_model, self.inner, self.tokens = draft_model, inner, tokens
        self.has_vocabulary = has_vocabulary

    def new_session(self) -> DraftModelSession:
        return DraftModelSession(self)

    def find_text(self, ctx: DecodeContext) -> ReadText:
        """Return what the draft model has read of the text in a cache of the full model.

        It stays with this cache, so it is reused and forgotten together with it.
        """
        text = ctx.cache.companions.get(self)
        if not isinstance(text, ReadText):
            text = ReadText(self.draft_model.new_cache(1, round_slots(1)))
            ctx.cache.companions[self] = text
        return text


class DraftModelSession(DraftSession):
    """A session that drafts one request with a second model.

    The first pass of a draft reads all tokens that the draft model has not read, whoever drafted
    them. K/V of its accepted tokens stay. Those of rejected tokens are written over.
    """

    def __init__(self, drafter: DraftModelDrafter):
        self.drafter, self.session = drafter, drafter.inner.new_session()
        self._text: ReadText | None = None
        self._n_settled = 0  # first tokens of `_text` that are those of the request
        self._own_history: list[int] = []  # the draft model's ids of the request's tokens

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        return self._draft_after(ctx, (), max_tokens)

    def continue_draft(
        self, ctx: DecodeContext, tokens: Sequence[int], max_tokens: int
    ) -> Draft | None:
        if self.drafter.draft_model.spec.is_recurrent:  # its state after tokens is not taken back
            return None
        draft = self._draft_after(ctx, tokens, max_tokens)
        return None if draft is None else draft.main_path()

    def _draft_after(
        self, ctx: DecodeContext, forced: Sequence[int], max_tokens: int
    ) -> Draft | None:
        """Return a draft after the text and tokens that may be rejected."""
        history, drafter = ctx.history, self.drafter
        n_text, context = len(history) + len(forced), drafter.draft_model.spec.context_length
        if context is not None:
            max_tokens = min(max_tokens, context - n_text)
        if max_tokens < 1:
            return None
        text = self._text = self._text or drafter.find_text(ctx)
        n_right = self._n_settled + common_prefix_length(
            text.tokens[self._n_settled :], history[self._n_settled : -1]
        )
        unread = [*history[n_right:], *forced]
        del text.tokens[n_right:]
        text.cache.length = n_right
        if ctx.cache.stable_buffers:  # else a row, which is as long as the longest of its batch
            text.cache.reserve(ctx.cache.capacity)
        self._n_settled = n_right
        own = self._own_context(ctx, text.cache, unread)
        is_recurrent = drafter.draft_model.spec.is_recurrent
        if is_recurrent:
            self._read_all_but_last(own)
            text.tokens += unread[:-1]
        draft = self.session.draft(own, max_tokens)
        if draft is None:
            return None
        draft = drafter.tokens.to_full(draft)
        if not is_recurrent:  # which drops the states of a draft
            text.tokens += [*unread, *draft.main_path().tokens[:-1].tolist()]
        self._n_settled = len(history) - 1
        return draft

    def _read_all_but_last(self, own: DecodeContext) -> None:
        """Let a draft model with recurrent layers read the text, except for the last token.

        Only a pass of all layers keeps the states after it.
        """
        rows, n_unread = own.pending[:, :-1], own.pending.shape[1] - 1
        if n_unread:
            plan = own.planner.plan_chain(own.cache.length, n_unread)
            forward(own.model, rows, own.cache, plan, last_only=True)
            own.cache.length += n_unread
            own.pending = own.pending[:, -1:]

    def _own_context(
        self, ctx: DecodeContext, cache: KVCache, unread: Sequence[int]
    ) -> DecodeContext:
        """Return the draft model's view of the request."""
        drafter, tokens = self.drafter, self.drafter.tokens
        self._own_history += tokens.to_own(ctx.history[len(self._own_history) :])
        return replace(
            ctx,
            model=drafter.draft_model,
            cache=cache,
            pending=ctx.pending.new_tensor([tokens.to_own(unread)]),
            history=self._own_history,
            sampler=ctx.sampler if drafter.has_vocabulary else tokens.restrict(ctx.sampler),
        )

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        self.session.verified(ctx, accepted_nodes)
