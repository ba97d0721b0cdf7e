"""Mistakes: recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from skipsearch.cache import KVCache
from skipsearch.models.recurrent import RecurrentCache, Standing

from ..recurrent_checks import check_growing_recurrent, check_recurrent
from .register import caught_by


@caught_by(check_recurrent)
def recurrent_state_not_restored() -> Iterator[None]:
    """What a rejected draft changed in a state stays changed."""
    real = RecurrentCache.begin

    def begin(self: RecurrentCache, start: int, mask: Any) -> Standing | None:
        if self.latest is not None and self.latest.at > start:
            self.latest = Standing(start, self.latest.states)
        return real(self, start, mask)

    with patch.object(RecurrentCache, "begin", begin):
        yield


@caught_by(check_recurrent)
def riding_rows_counted_twice() -> Iterator[None]:
    """Tokens that rode along with a pass, and are in the states that it kept, ride along with the next one too."""
    real = RecurrentCache.passed

    def passed(self: RecurrentCache, start: int, kept: Any, latest: Standing) -> None:
        began = self.kept.at if self.kept is not None else 0
        real(self, start, kept, latest)
        if kept is not None:
            self.kept = Standing(began, kept)

    with patch.object(RecurrentCache, "passed", passed):
        yield


@caught_by(check_recurrent)
def states_of_a_draft_verify() -> Iterator[None]:
    """A verify pass goes on from where a draft's states happen to stand."""
    real = RecurrentCache.begin

    def begin(self: RecurrentCache, start: int, mask: Any) -> Standing | None:
        if mask is None and self.draft is not None:
            return Standing(start, self.draft[1].states)
        return real(self, start, mask)

    with patch.object(RecurrentCache, "begin", begin):
        yield


@caught_by(check_recurrent)
def states_shared_and_not_copied() -> Iterator[None]:
    """A draft changes the very states that verification goes on from."""
    with patch("skipsearch.models.recurrent.cloned", lambda state: state):
        yield


@caught_by(check_growing_recurrent)
def tokens_left_behind_in_a_small_cache() -> Iterator[None]:
    """A session's larger cache takes K/V and states over, and not the tokens that are to ride along."""
    real = RecurrentCache.take_over

    def take_over(self: RecurrentCache, other: KVCache, count: int) -> None:
        real(self, other, count)
        self.tokens.zero_()

    with patch.object(RecurrentCache, "take_over", take_over):
        yield
