"""Reuse the K/V of an earlier request, so that a shared prefix is not computed again.

Slot i holds the K/V of token i, which depends only on tokens 0 … i. After a request, the first
slots hold its prompt and answer. A prompt that begins with the same tokens reuses their slots.
Later slots are hidden, as after a rejected draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from skipsearch.core.sequences import common_prefix_length
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, Planner, round_slots

FIRST_TOKENS = 128  # answer tokens for which a new lease reserves slots; more slots come later


@dataclass
class Lease:
    """The cache of one request."""

    cache: KVCache  # its `length` is the number of slots that the prompt reuses
    planner: Planner
    history: Sequence[int]  # the prompt; the request sets it to prompt and emitted tokens


class CacheSource(Protocol):
    """A source that lends caches to requests."""

    def lease(
        self, prompt: Sequence[int], slots: int, model: ModelAdapter
    ) -> AbstractContextManager[Lease]:
        """Lend a cache whose passes may use `slots` slots, and take it back after the request."""


def lend(
    cache: KVCache, prompt: Sequence[int], first: int, slots: int, model: ModelAdapter
) -> Lease:
    """Make a lease of a cache.

    first: slots to reserve now. slots: the most slots that passes may use.
    """
    cache.reserve(first)
    return Lease(cache, Planner(round_slots(slots), model.spec.device), prompt)


def first_slots(prompt: Sequence[int], slots: int) -> int:
    """Return the number of slots that a request reserves at its start."""
    return min(slots, len(prompt) + FIRST_TOKENS)


class PrefixCache:
    """A cache for successive requests of one user."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # tokens whose K/V (of the full model) are in the first slots
        self._cache: KVCache | None = None
        self._leased = Lock()

    @classmethod
    def restore(cls, tokens: Sequence[int], cache: KVCache) -> PrefixCache:
        """Return a prefix cache with the K/V of tokens, which are in the first slots of `cache`."""
        prefix = cls()
        prefix.tokens, prefix._cache = list(tokens), cache
        return prefix

    @property
    def cache(self) -> KVCache | None:
        """The cache, whose first slots hold the K/V of `tokens`; None: there is none yet."""
        return self._cache

    @property
    def nbytes(self) -> int:
        """The size of the cached K/V in bytes."""
        return 0 if self._cache is None else self._cache.nbytes

    def count_shared(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens of a prompt that need no pass.

        The last token always needs a pass, because its logits choose the first new token.
        """
        n_shared = min(common_prefix_length(self.tokens, prompt), len(prompt) - 1)
        return 0 if self._cache is None else self._cache.resumable_length(n_shared)

    @contextmanager
    def lease(self, prompt: Sequence[int], slots: int, model: ModelAdapter) -> Iterator[Lease]:
        """Lend the cache, and then store the K/V that the request commits, even after an error.

        Raises: DecodeError if another request uses the cache.
        """
        if not self._leased.acquire(blocking=False):
            raise DecodeError(
                "this session is in the middle of an answer: read that to its end or close it, or "
                "take another session"
            )
        try:
            n_shared = self.count_shared(prompt)
            if self._cache is None:
                self._cache = model.new_cache(1, round_slots(1))
            self._cache.length, self.tokens = n_shared, list(prompt[:n_shared])
            lease = lend(self._cache, prompt, first_slots(prompt, slots), slots, model)
            try:
                yield lease
            finally:
                self._retain(lease.history)
        finally:
            self._leased.release()

    def _retain(self, history: Sequence[int]) -> None:
        """Keep only the K/V of committed tokens, and shrink the cache to their number."""
        assert self._cache is not None
        self.tokens = list(history[: self._cache.length])
        self._cache.length = len(self.tokens)
        try:
            self._cache.shrink(self._cache.length + FIRST_TOKENS)
        except Exception:
            # Not enough memory for the smaller copy: the next request computes its whole prompt.
            self._cache, self.tokens = None, []
