"""K/V that one request leaves to the next: what a prompt shares with the text before it, from the first token on, is not computed again.

Slot i holds the K/V of token i, computed from tokens 0 … i alone. So after a request the first slots stand for the tokens of its prompt
and answer, and another prompt that begins with some of these tokens finds theirs there. What stood behind them is hidden, as after any
rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from skipsearch.cache import KVCache, Planner
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelAdapter

Room = tuple[KVCache, Planner]


def new_room(model: ModelAdapter, slots: int) -> Room:
    """An empty cache of at least so many slots: a power of two, as engines with fixed shapes want it."""
    capacity = max(256, 1 << (slots - 1).bit_length())
    return model.new_cache(1, capacity), Planner(capacity, model.spec.device)


class Lender(Protocol):
    """Lends a request the cache that it runs on."""

    def lend(self, prompt: Sequence[int], slots: int, model: ModelAdapter) -> Room:
        """A cache of at least so many slots, whose `length` counts those that are the prompt's already."""

    def give_back(self, history: Sequence[int]) -> None:
        """The request is over. history: its prompt and what it emitted."""


class Prefix:
    """One user's, for one request after the other. tokens: those whose K/V of the full model stand in the first slots."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._room: Room | None = None
        self._lent = Lock()

    @property
    def bytes(self) -> int:
        """Of the K/V that it holds on to."""
        return 0 if self._room is None else self._room[0].bytes

    def shared(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that need no pass. Its last token always does, since the first new one is chosen from its logits."""
        same = min(common(self.tokens, prompt), len(prompt) - 1)
        return 0 if self._room is None else self._room[0].usable(same)

    def lend(self, prompt: Sequence[int], slots: int, model: ModelAdapter) -> Room:
        """A cache of at least so many slots, whose `length` counts those that are the prompt's already.

        Raises: DecodeError while another request runs on it.
        """
        if not self._lent.acquire(blocking=False):
            raise DecodeError("this session is in the middle of an answer: read that to its end or close it, or take another session")
        try:
            known = self.shared(prompt)
            if self._room is None or self._room[0].capacity < slots:
                room = new_room(model, slots)
                if self._room is not None:
                    room[0].take_over(self._room[0], known)
                self._room = room
            self._room[0].length, self.tokens = known, list(prompt[:known])
        except BaseException:
            self._lent.release()
            raise
        return self._room

    def keep(self, cache: KVCache) -> None:
        """Take the committed K/V of a request that began with what was lent and ran on another cache."""
        assert self._room is not None
        self._room[0].take_over(cache, cache.length)
        self._room[0].length = cache.length

    def give_back(self, history: Sequence[int]) -> None:
        """The request is over. history: its prompt and what it emitted; K/V of drafted tokens behind that are worth nothing."""
        assert self._room is not None
        self.tokens = list(history[:self._room[0].length])
        self._room[0].length = len(self.tokens)
        self._lent.release()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    most = min(len(one), len(other))
    return next((i for i in range(most) if one[i] != other[i]), most)
