"""Bugs of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

from skipsearch.models.generic.recurrent import RecurrentCache, StateAt

from ..recurrent_checks import check_growing_recurrent, check_recurrent
from .register import caught_by, planted


@planted(check_recurrent, RecurrentCache, "begin_pass")
def recurrent_state_not_restored(real, self, start, mask):
    """A rejected draft's changes of a state remain."""
    if self.end_state is not None and self.end_state.position > start:
        self.end_state = StateAt(start, self.end_state.states)
    return real(self, start, mask)


@planted(check_recurrent, RecurrentCache, "end_full_pass")
def riding_rows_counted_twice(real, self, start, kept, latest):
    """Tokens that were added to a pass, and are in its states, are added to the next one too."""
    began = self.start_state.position if self.start_state is not None else 0
    real(self, start, kept, latest)
    if kept is not None:
        self.start_state = StateAt(began, kept)


@planted(check_recurrent, RecurrentCache, "begin_pass")
def states_of_a_draft_verify(real, self, start, mask):
    """A verify pass continues from the states of the draft."""
    if mask is None and self.draft_state is not None:
        return StateAt(start, self.draft_state[1].states)
    return real(self, start, mask)


@caught_by(check_recurrent)
def states_shared_and_not_copied() -> Iterator[None]:
    """A draft changes the same states from which verification continues."""
    with patch("skipsearch.models.generic.recurrent.clone_state", lambda state: state):
        yield


@planted(check_growing_recurrent, RecurrentCache, "_set_capacity")
def tokens_left_behind_in_a_small_cache(real, self, capacity):
    """A cache that grows keeps K/V and states, but not the tokens to add to the next pass."""
    real(self, capacity)
    self.tokens.zero_()
