"""Bugs of drafts with trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from skipsearch.decoding import loop
from skipsearch.drafters import DecodeContext
from skipsearch.drafters.reduced_session import ReducedSession

from ..adapted_checks import check_adapted, check_adapted_drafts
from .register import caught_by


@caught_by(check_adapted)
def trained_weights_verify() -> Iterator[None]:
    """The trained sub-layers are put into the model itself, so that verification runs them too."""
    real = ReducedSession.begin

    def begin(self: ReducedSession, ctx: DecodeContext) -> None:
        ctx.model = self.reduced_model.model
        real(self, ctx)

    real_full = loop.DecodeLoop._run_round

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        with patch.object(self, "model", request.ctx.model):
            return real_full(self, request, room)

    with (
        patch.object(ReducedSession, "begin", begin),
        patch.object(loop.DecodeLoop, "_run_round", rounds),
    ):
        yield


@caught_by(check_adapted_drafts)
def trained_weights_are_never_used() -> Iterator[None]:
    """Decoding is lossless but gains nothing: the draft uses the model's own weights."""
    with patch.object(
        ReducedSession, "draft", lambda self, ctx, most: self.session.draft(ctx, most)
    ):
        yield
