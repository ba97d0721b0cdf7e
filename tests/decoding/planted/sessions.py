"""Mistakes: what one request leaves to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from skipsearch.cache import KVCache, Planner
from skipsearch.decoding.prefix import Prefix, new_room

from ..prefix_checks import check_growing, check_prefixes
from .register import caught_by


@caught_by(check_prefixes)
def stale_tail_of_a_session() -> Iterator[None]:
    """What stood behind the shared tokens still counts as known, though another text follows them now."""
    with patch.object(Prefix, "shared", lambda self, prompt: min(len(self.tokens), len(prompt) - 1)):
        yield


@caught_by(check_prefixes)
def drafted_tokens_kept_by_a_session() -> Iterator[None]:
    """A session stands for more than what was emitted: the token that is still pending has no K/V."""
    real = Prefix.give_back

    def give_back(self: Prefix, history: Sequence[int]) -> None:
        assert self._room is not None
        self._room[0].length = len(history)
        real(self, history)

    with patch.object(Prefix, "give_back", give_back):
        yield


@caught_by(check_prefixes)
def another_sessions_prefix() -> Iterator[None]:
    """The K/V of all sessions lies in one cache, while each remembers its own tokens."""
    room: list[tuple[KVCache, Planner]] = []
    real = Prefix.lend

    def lend(self: Prefix, prompt: Sequence[int], slots: int, model: Any) -> tuple[KVCache, Planner]:
        room.extend([new_room(model, 512)] if not room else [])
        self._room = room[0]
        return real(self, prompt, slots, model)

    with patch.object(Prefix, "lend", lend):
        yield


@caught_by(check_growing)
def a_larger_cache_without_what_was_known() -> Iterator[None]:
    with patch.object(KVCache, "take_over", lambda self, other, count: None):
        yield
