"""K/V of earlier requests, for later ones with the same key that begin alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.serve.prefix_disk import MIN_TOKENS, PrefixDisk

# Sharing fewer tokens is not worth the rest of a prefix, which the request overwrites.
MIN_SHARED_TOKENS = 16


class PrefixPool:
    """The idle prefix caches, least recently used first, limited in number and in bytes of K/V.

    Each belongs to one key for all of its life. A request with another key sees neither its tokens,
    nor its K/V, nor that it exists.
    Only the scheduler thread uses the pool. disk: stores the prefix caches that are dropped, and
    those that are idle when the pool closes; None: they are lost. A thread writes them one by one.
    A prefix cache that is dropped waits until the one before is written, so that memory is bounded.
    """

    def __init__(self, max_idle: int, max_bytes: int, disk: PrefixDisk | None = None):
        self.max_idle, self.max_bytes, self.disk = max_idle, max_bytes, disk
        self._idle: list[tuple[str, PrefixCache]] = []
        self._writer = ThreadPoolExecutor(1, "prefix-cache") if disk else None
        # The latest write: the key, the prefix cache and when it ends.
        self._written: tuple[str, PrefixCache, Future[None]] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the K/V of the idle prefix caches."""
        return sum(prefix.nbytes for _, prefix in self._idle)

    def acquire(self, tenant: str, prompt_ids: Sequence[int]) -> PrefixCache:
        """Return the prefix cache of this key that shares most tokens with the prompt.

        Returns a new one if none shares enough.
        """
        own = [prefix for owner, prefix in self._idle if owner == tenant]
        best = max(own, key=lambda prefix: prefix.count_shared(prompt_ids), default=None)
        n_shared = 0 if best is None else best.count_shared(prompt_ids)
        self._wait_for_write(
            lambda owner, prefix: (
                owner == tenant and prefix.count_shared(prompt_ids) >= n_shared + MIN_TOKENS
            )
        )
        if self.disk and self.disk.count_shared(tenant, prompt_ids) >= n_shared + MIN_TOKENS:
            stored = self.disk.load(tenant, prompt_ids)
            if stored is not None:
                return stored
        if best is None or best.count_shared(prompt_ids) < min(MIN_SHARED_TOKENS, len(best.tokens)):
            return PrefixCache()
        self._idle = [(owner, prefix) for owner, prefix in self._idle if prefix is not best]
        return best

    def release(self, tenant: str, prefix: PrefixCache) -> None:
        """Put a prefix cache back for later requests.

        If a limit is exceeded, the least recently used prefix caches of all keys are dropped.
        """
        self._idle.append((tenant, prefix))
        while len(self._idle) > self.max_idle or self.bytes > self.max_bytes:
            self._store(*self._idle.pop(0))

    def close(self) -> None:
        """Store the idle prefix caches, if there is a disk for them."""
        for tenant, prefix in self._idle:
            self._store(tenant, prefix)
        if self._writer is not None:
            self._writer.shutdown()

    def _store(self, tenant: str, prefix: PrefixCache) -> None:
        if self.disk is not None and self._writer is not None:
            self._wait_for_write(lambda owner, prefix: True)
            write = self._writer.submit(self.disk.store, tenant, prefix)
            self._written = tenant, prefix, write
            write.add_done_callback(self._forget_written)

    def _wait_for_write(self, is_needed: Callable[[str, PrefixCache], bool]) -> None:
        """Wait for the write that is going on, if its key and prefix cache are needed."""
        written = self._written  # the thread that writes forgets it at its end
        if written is not None and is_needed(*written[:2]):
            wait([written[2]])

    def _forget_written(self, write: Future[None]) -> None:
        """Free the prefix cache that was written."""
        if self._written and self._written[2] is write:
            self._written = None
