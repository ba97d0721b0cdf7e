"""Bugs of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from skipsearch.models.generic.recurrent import RecurrentCache, StateAt

from ..recurrent_checks import check_growing_recurrent, check_recurrent
from .register import caught_by


@caught_by(check_recurrent)
def recurrent_state_not_restored() -> Iterator[None]:
    """A rejected draft's changes of a state remain."""
    real = RecurrentCache.begin_pass

    def begin(self: RecurrentCache, start: int, mask: Any) -> StateAt | None:
        if self.end_state is not None and self.end_state.position > start:
            self.end_state = StateAt(start, self.end_state.states)
        return real(self, start, mask)

    with patch.object(RecurrentCache, "begin_pass", begin):
        yield


@caught_by(check_recurrent)
def riding_rows_counted_twice() -> Iterator[None]:
    """Tokens that were added to a pass, and are in its states, are added to the next one too."""
    real = RecurrentCache.end_full_pass

    def passed(self: RecurrentCache, start: int, kept: Any, latest: StateAt) -> None:
        began = self.start_state.position if self.start_state is not None else 0
        real(self, start, kept, latest)
        if kept is not None:
            self.start_state = StateAt(began, kept)

    with patch.object(RecurrentCache, "end_full_pass", passed):
        yield


@caught_by(check_recurrent)
def states_of_a_draft_verify() -> Iterator[None]:
    """A verify pass continues from the states of the draft."""
    real = RecurrentCache.begin_pass

    def begin(self: RecurrentCache, start: int, mask: Any) -> StateAt | None:
        if mask is None and self.draft_state is not None:
            return StateAt(start, self.draft_state[1].states)
        return real(self, start, mask)

    with patch.object(RecurrentCache, "begin_pass", begin):
        yield


@caught_by(check_recurrent)
def states_shared_and_not_copied() -> Iterator[None]:
    """A draft changes the same states from which verification continues."""
    with patch("skipsearch.models.generic.recurrent.clone_state", lambda state: state):
        yield


@caught_by(check_growing_recurrent)
def tokens_left_behind_in_a_small_cache() -> Iterator[None]:
    """A cache that grows keeps K/V and states, but not the tokens to add to the next pass."""
    real = RecurrentCache._set_capacity

    def set_capacity(self: RecurrentCache, capacity: int) -> None:
        real(self, capacity)
        self.tokens.zero_()

    with patch.object(RecurrentCache, "_set_capacity", set_capacity):
        yield
