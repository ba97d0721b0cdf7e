"""Decoders whose drafter is a test's own: one that takes notes, or an exit policy that no profile
could name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skipsearch.decoding import Decoder
from skipsearch.drafters import DecodeContext, Drafter, DraftSession
from skipsearch.engine import forward
from skipsearch.models import ModelAdapter


def begin_session(drafter: Any, ctx: DecodeContext) -> DraftSession:
    """A session of a drafter for a request whose prompt is in the cache. One that watches is shown
    a prefill of it again.
    """
    session: DraftSession = drafter.new_session()
    if not session.observes_hidden:
        session.begin(ctx)
        return session
    prompt = torch.tensor([ctx.history[: ctx.prompt_length]])
    plan = ctx.planner.plan_chain(0, ctx.prompt_length)
    with torch.no_grad():
        forward(
            ctx.model,
            prompt,
            ctx.cache,
            plan,
            tap=session.tap(ctx.model, ctx.cache, plan, ctx.prompt_length),
        )
        session.begin(ctx)
    return session


def decoder_with(model: ModelAdapter, drafter: Any, draft_length: int) -> Decoder:
    """A decoder with one drafter, made already."""
    decoder = Decoder(model)
    decoder.loop.drafters = [(draft_length, drafter)]
    return decoder


def wrap_drafters(decoder: Decoder, wrap: Callable[[Drafter], Any]) -> Decoder:
    """The same decoder with something around each of its drafters."""
    decoder.loop.drafters = [(length, wrap(drafter)) for length, drafter in decoder.loop.drafters]
    return decoder
