"""Bugs of what one request leaves to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.models.kv_cache import KVCache

from ..prefix_checks import check_prefixes
from .register import caught_by, planted


@caught_by(check_prefixes)
def stale_tail_of_a_session() -> Iterator[None]:
    """Old K/V after the shared tokens still count as known, though another text follows now."""
    with patch.object(
        PrefixCache, "count_shared", lambda self, prompt: min(len(self.tokens), len(prompt) - 1)
    ):
        yield


@planted(check_prefixes, PrefixCache, "_retain")
def drafted_tokens_kept_by_a_session(real, self, history):
    """A session counts more than the committed tokens: the pending token has no K/V."""
    assert self._cache is not None
    self._cache.length = len(history)
    real(self, history)


@caught_by(check_prefixes)
def another_sessions_prefix() -> Iterator[None]:
    """The K/V of all sessions are in one cache, but each session has its own list of tokens."""
    caches: list[KVCache] = []
    real = PrefixCache.lease

    def lease(self: PrefixCache, prompt: Sequence[int], slots: int, model: Any) -> Any:
        caches.extend([model.new_cache(1, 512)] if not caches else [])
        self._cache = caches[0]
        return real(self, prompt, slots, model)

    with patch.object(PrefixCache, "lease", lease):
        yield
