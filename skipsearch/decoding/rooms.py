"""Which request of a batch has which row of the shared cache, and what a row begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skipsearch.cache import Planner
from skipsearch.decoding.prefix import Prefix, Room, common
from skipsearch.engine import RowCache, SharedCache
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelAdapter


class Rooms:
    """The shared cache of a batch and who has which row of it. join: as `RowCache` has it."""

    def __init__(self, model: ModelAdapter, rows: int, join: Callable[..., Any]):
        self.model, self.rows, self.join = model, rows, join
        self._shared: SharedCache | None = None
        self._planner: Planner | None = None
        self._taken: dict[int, RowCache] = {}
        self._prompts: dict[RowCache, tuple[str, Sequence[int]]] = {}   # of rows with an owner

    def begin(self, cache: RowCache, prompt: Sequence[int], owner: str) -> None:
        """K/V of what a prompt begins with as another one of its owner does are copied, where they are more than the cache has already."""
        known = {other: min(common(prompt, text), other.length, len(prompt) - 1)
                 for other, (its, text) in self._prompts.items() if its == owner}
        best = max(known, key=lambda other: known[other], default=None)
        if best is not None and known[best] > cache.length:
            cache.take_over(best, known[best])
            cache.length = known[best]
        self._prompts[cache] = owner, prompt

    def take(self, slots: int) -> tuple[RowCache, Planner]:
        """A row that nobody has, empty. Raises: DecodeError where there is none."""
        capacity = max(256, 1 << (slots - 1).bit_length())
        if self._shared is None or self._planner is None or self._shared.spare < capacity:
            self.model.new_cache(1, capacity + 1)   # which lets the engine know how long texts may become
            self._planner = Planner(capacity, self.model.spec.device)
            if self._shared is None:
                self._shared = SharedCache(self.model.spec.n_layers, self.rows, capacity)
            self._shared.grow(capacity)
        row = next((i for i in range(self.rows) if i not in self._taken), None)
        if row is None:
            raise DecodeError(f"the batch has {self.rows} rows and all are taken")
        cache = self._taken[row] = RowCache(self._shared, row, self.join)
        return cache, self._planner

    def free(self, cache: RowCache) -> None:
        del self._taken[cache.first]
        self._prompts.pop(cache, None)

    def close_ranks(self) -> None:
        """Rows that are in use stand next to each other, so that a pass over them runs over no empty ones. Between rounds only."""
        for place in range(len(self._taken)):
            if place not in self._taken and self._shared is not None:
                cache = self._taken.pop(max(self._taken))
                self._shared.move(cache, place)
                self._taken[place] = cache


class Lent:
    """Lends a row of a batch. prefix: what an earlier request left, copied into the row, and where this one leaves a copy."""

    def __init__(self, rooms: Rooms, prefix: Prefix | None, owner: str | None):
        self._rooms, self._prefix, self._owner = rooms, prefix, owner
        self._cache: RowCache | None = None

    def lend(self, prompt: Sequence[int], slots: int, model: ModelAdapter) -> Room:
        self._cache, planner = self._rooms.take(slots)
        if self._prefix is not None:
            try:
                cache, _ = self._prefix.lend(prompt, slots, model)
            except BaseException:
                self._rooms.free(self._cache)
                raise
            self._cache.take_over(cache, cache.length)
            self._cache.length = cache.length
        if self._owner is not None:
            self._rooms.begin(self._cache, prompt, self._owner)
        return self._cache, planner

    def give_back(self, history: Sequence[int]) -> None:
        assert self._cache is not None
        if self._prefix is not None:
            self._prefix.keep(self._cache)
            self._prefix.give_back(history)
        self._rooms.free(self._cache)
