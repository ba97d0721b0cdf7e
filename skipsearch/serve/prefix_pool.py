"""K/V of earlier requests, for later ones of the same key that begin alike."""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.decoding.prefix_cache import PrefixCache

MIN_SHARED_TOKENS = (
    16  # tokens; sharing fewer does not pay for overwriting what else a prefix holds
)


class PrefixPool:
    """At most so many that nobody uses, with at most so many bytes of K/V, the one used last at the
    end. The worker alone touches them.

    A prefix belongs to one key for as long as it lives: no request of another key sees its tokens,
    its K/V, or that it was there."""

    def __init__(self, max_idle: int, max_bytes: int):
        self.max_idle, self.max_bytes = max_idle, max_bytes
        self._idle: list[tuple[str, PrefixCache]] = []

    @property
    def bytes(self) -> int:
        """Of the K/V that nobody uses."""
        return sum(prefix.nbytes for _, prefix in self._idle)

    def acquire(self, tenant: str, prompt_ids: Sequence[int]) -> PrefixCache:
        """The one of this key that shares most with the prompt; a new one where none shares
        enough.
        """
        own = [prefix for owner, prefix in self._idle if owner == tenant]
        best = max(own, key=lambda prefix: prefix.count_shared(prompt_ids), default=None)
        if best is None or best.count_shared(prompt_ids) < min(MIN_SHARED_TOKENS, len(best.tokens)):
            return PrefixCache()
        self._idle = [(owner, prefix) for owner, prefix in self._idle if prefix is not best]
        return best

    def release(self, tenant: str, prefix: PrefixCache) -> None:
        """For the next request. Those that were used longest ago make room, whosever they are."""
        self._idle.append((tenant, prefix))
        while len(self._idle) > self.max_idle or self.bytes > self.max_bytes:
            del self._idle[0]
