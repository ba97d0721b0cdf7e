"""Run a drafter on another model than the verifying one.

This is a model with trained weights, or one that reads less: fewer bits, or a smaller head.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from skipsearch.core.reading import Reading
from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession, LearningDrafter
from skipsearch.engine import LayerTap
from skipsearch.engine.reduced_model import ReducedModel, make_reduced_model
from skipsearch.engine.sampler import TokenSampler
from skipsearch.errors import MaskError
from skipsearch.models.adapter import DraftScores, DrawSettings, ModelAdapter
from skipsearch.models.head_rows import HeadRows
from skipsearch.models.kv_cache import KVCache, PassPlan


def reduce_reading(drafter: Drafter, model: ModelAdapter, reading: Reading) -> Drafter:
    """Return a drafter whose draft passes read what `reading` says of the verifying model.

    Raises: as `draft_with`.
    """
    return drafter if reading.is_everything else draft_with(drafter, model, reading)


def draft_with(drafter: Drafter, model: ModelAdapter, reading: Reading) -> Drafter:
    """Return a drafter that drafts with `model`, of which it reads what `reading` says.

    The model writes to the cache of the verifying model. Raises: ModelError if the model has no
    such draft; MaskError for a token outside the vocabulary.
    """
    learns = isinstance(drafter, LearningDrafter)
    try:
        reduced_model = make_reduced_model(model, reading)
        return (LearningReducedDrafter if learns else ReducedDrafter)(drafter, reduced_model)
    except ValueError as error:
        raise MaskError(f"{error}; was this vocabulary made for another model?") from None


class ReducedDrafter:
    """A drafter that runs another drafter on a reduced model."""

    def __init__(self, drafter: Drafter, reduced_model: ReducedModel):
        self.drafter, self.reduced_model = drafter, reduced_model

    def new_session(self) -> ReducedSession:
        return ReducedSession(self.drafter.new_session(), self.reduced_model)


class LearningReducedDrafter(ReducedDrafter):
    """A drafter on a reduced model whose own drafter learns from request to request."""

    drafter: LearningDrafter  # type: ignore[assignment]

    @property
    def is_learning(self) -> bool:
        return self.drafter.is_learning


class ReducedSession(DraftSession):
    """A session that gives another session the reduced model for its draft passes.

    The tokens of the request are added to the head before each draft. Draft passes with a part of
    the vocabulary are not merged with those of other requests, because heads differ.
    """

    def __init__(self, session: DraftSession, reduced_model: ReducedModel):
        self.session, self.reduced_model = session, reduced_model
        self.observes_hidden, self.selects_mask = session.observes_hidden, session.selects_mask  # type: ignore[misc]
        self.observes_last_hidden_only = session.observes_last_hidden_only  # type: ignore[misc]
        self._head: HeadRows | None = None
        self._restricted: ModelAdapter | None = None
        self._n_added = 0  # tokens of the history whose rows are in the head

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        return self.session.tap(model, cache, plan, n_rows)

    def begin(self, ctx: DecodeContext) -> None:
        self.session.begin(ctx)

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        return self.session.draft(self._reduce(ctx), max_tokens)

    def continue_draft(
        self, ctx: DecodeContext, tokens: Sequence[int], max_tokens: int
    ) -> Draft | None:
        return self.session.continue_draft(self._reduce(ctx), tokens, max_tokens)

    def _reduce(self, ctx: DecodeContext) -> DecodeContext:
        """Return the context with the reduced model, whose head has the tokens of the text."""
        model, sampler = self.reduced_model.model, ctx.sampler
        if self.reduced_model.new_head is not None:
            if self._head is None:
                self._head = self.reduced_model.new_head()
                self._restricted = self.reduced_model.restrict(self._head)
            assert self._restricted is not None
            self._head.add(ctx.history[self._n_added :])
            self._n_added = len(ctx.history)
            model, sampler = self._restricted, HeadRowsSampler(ctx.sampler, self._head)
        return replace(ctx, model=model, sampler=sampler)

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        self.session.verified(ctx, accepted_nodes)

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        self.session.committed(ctx, accepted_rows)


class HeadRowsSampler:
    """A sampler of logits [B, rows of the head], which returns token ids.

    Tokens without a row have probability 0 in the draft's distribution q. Rejection sampling
    therefore never sees them as draft tokens, and emits them as corrections.
    """

    def __init__(self, sampler: TokenSampler, head: HeadRows):
        self.sampler, self.head = sampler, head

    @property
    def key(self) -> Hashable:
        return self.sampler.key, id(self.head), self.head.count

    @property
    def is_greedy(self) -> bool:
        return self.sampler.is_greedy

    @property
    def draw_settings(self) -> DrawSettings | None:
        return self.sampler.draw_settings

    @property
    def n_choices(self) -> int:
        return self.sampler.n_choices

    def score(self, logits: Tensor, with_confidence: bool) -> DraftScores:
        scores, tokens = self.sampler.score(logits, with_confidence), self.head.token_ids
        if scores.probs is None:
            assert scores.choice is not None
            return replace(scores, choice=tokens[scores.choice])
        probs = scores.probs.new_zeros(*scores.probs.shape[:-1], self.head.vocab_size)
        probs[..., tokens] = scores.probs
        return replace(scores, probs=probs)

    def draw(self, scores: DraftScores) -> tuple[Tensor, Tensor | None]:
        return self.sampler.draw(scores)

    def top(self, n_choices: int) -> TokenSampler:
        return HeadRowsSampler(self.sampler.top(n_choices), self.head)
