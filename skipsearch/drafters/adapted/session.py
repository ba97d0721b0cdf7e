"""Draft as `skip` does, on a model with trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.engine import LayerTap
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan


class OnModelDrafter:
    """A drafter that runs another drafter on a model of its own.

    model: the drafting model. It writes to the cache of the verifying model.
    """

    def __init__(self, drafter: Drafter, model: ModelAdapter):
        self.drafter, self.model = drafter, model

    def new_session(self) -> OnModelSession:
        return OnModelSession(self.drafter.new_session(), self.model)


class OnModelSession(DraftSession):
    """A session that passes `model`, in place of the verifying model, to another session."""

    def __init__(self, session: DraftSession, model: ModelAdapter):
        self.session, self.model = session, model
        self.observes_hidden = session.observes_hidden  # type: ignore[misc]

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        return self.session.tap(model, cache, plan, n_rows)

    def begin(self, ctx: DecodeContext) -> None:
        self.session.begin(ctx)

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        return self.session.draft(replace(ctx, model=self.model), max_tokens)

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        self.session.verified(ctx, accepted_nodes)

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        self.session.committed(ctx, accepted_rows)
