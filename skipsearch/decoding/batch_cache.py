"""The rows of the shared cache of a batch: leases, shared prefixes, and moves of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from skipsearch.core.sequences import common_prefix_length
from skipsearch.decoding.prefix_cache import Lease, PrefixCache, first_slots, lend
from skipsearch.engine import RowCache, SharedCache
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, round_slots


class BatchCache:
    """The shared cache of a batch and the leases of its rows.

    Each row has slots for the longest text of the batch. The shared cache is released if no row is
    in use.

    submit: as in `RowCache`. max_slots: slots of all rows together; None: no limit. Each row may
    have the smallest cache size, even if the rows then exceed `max_slots`. If a text is too long
    for a row, it is in a separate cache, and its passes run alone.
    """

    def __init__(
        self,
        model: ModelAdapter,
        n_rows: int,
        submit: Callable[..., Any],
        max_slots: int | None = None,
    ):
        self.model, self.n_rows, self.submit = model, n_rows, submit
        self.max_row_slots = (
            None
            if max_slots is None
            else max(round_slots(1), 1 << (max_slots // n_rows).bit_length() >> 1)
        )
        self._shared_cache: SharedCache | None = None
        self._leased: list[RowCache] = []
        self._prompts: dict[KVCache, tuple[str, Sequence[int]]] = {}  # tenant and prompt

    @property
    def bytes(self) -> int:
        """The size of the shared cache in bytes."""
        return 0 if self._shared_cache is None else self._shared_cache.nbytes

    def copy_shared_prefix(self, cache: KVCache, prompt: Sequence[int], tenant: str) -> None:
        """Copy the K/V of the longest prefix that a prompt shares with a request of its tenant.

        Nothing is copied if the cache already has a prefix of that length.
        """
        n_shared = {
            other: min(common_prefix_length(prompt, text), other.length, len(prompt) - 1)
            for other, (owner, text) in self._prompts.items()
            if owner == tenant
        }
        best = max(n_shared, key=lambda other: n_shared[other], default=None)
        if best is not None and n_shared[best] > cache.length:
            cache.copy_from(best, n_shared[best])
            cache.length = n_shared[best]
        self._prompts[cache] = tenant, prompt

    @contextmanager
    def lease(self, slots: int) -> Iterator[KVCache]:
        """Lend an empty row with `slots` slots or, if rows cannot have as many, a separate cache.

        Raises: DecodeError if all rows are taken.
        """
        if self.max_row_slots is not None and slots > self.max_row_slots:
            cache = self.model.new_cache(1, round_slots(slots))
        else:
            cache = self._new_row(slots)
        try:
            yield cache
        finally:
            self._prompts.pop(cache, None)
            if isinstance(cache, RowCache):
                self._leased.remove(cache)
            if (
                self._shared_cache is not None
                and self._shared_cache.padding_slot > round_slots(1)
                and not self._rows_in_use()
            ):
                self._shared_cache = None

    def compact_rows(self) -> None:
        """Move rows next to each other, so that passes run over no empty row.

        Call this only between rounds.
        """
        in_use = self._rows_in_use()
        for row in range(len(in_use)):
            if row not in in_use and self._shared_cache is not None:
                cache = in_use.pop(max(in_use))
                self._shared_cache.move_row(cache, row)
                in_use[row] = cache

    def _new_row(self, slots: int) -> RowCache:
        in_use = self._rows_in_use()
        row = next((i for i in range(self.n_rows) if i not in in_use), None)
        if row is None:
            raise DecodeError(f"the batch has {self.n_rows} rows and all are taken")
        if self._shared_cache is None:
            self._shared_cache = SharedCache(
                self.model.spec.n_layers, self.n_rows, round_slots(slots), self.max_row_slots
            )
        self._shared_cache.reserve(slots)
        cache = RowCache(self._shared_cache, row, self.submit)
        self._leased.append(cache)
        return cache

    def _rows_in_use(self) -> dict[int, RowCache]:
        return {cache.first_row: cache for cache in self._leased if not cache.alone}


class RowLease:
    """A `CacheSource` that lends rows of a batch.

    prefix_cache: the K/V of a shared prefix are copied from it to the row, and the request's K/V
    are copied back.
    """

    def __init__(
        self, batch_cache: BatchCache, prefix_cache: PrefixCache | None, tenant: str | None
    ):
        self._batch_cache, self._prefix_cache, self._tenant = batch_cache, prefix_cache, tenant

    @contextmanager
    def lease(self, prompt: Sequence[int], slots: int, model: ModelAdapter) -> Iterator[Lease]:
        first = first_slots(prompt, slots)
        with self._batch_cache.lease(first) as cache:
            lease = lend(cache, prompt, first, slots, model)
            with self._copied(lease, model):
                if self._tenant is not None:
                    self._batch_cache.copy_shared_prefix(cache, prompt, self._tenant)
                yield lease

    @contextmanager
    def _copied(self, lease: Lease, model: ModelAdapter) -> Iterator[None]:
        """Copy the shared prefix from the prefix cache, and the committed K/V back to it."""
        if self._prefix_cache is None:
            yield
            return
        with self._prefix_cache.lease(lease.history, 1, model) as prefix:
            lease.cache.copy_from(prefix.cache, prefix.cache.length)
            lease.cache.companions = prefix.cache.companions
            lease.cache.length = prefix.cache.length
            try:
                yield
            finally:
                # If there is no memory for the copy, the prefix cache does not change.
                with suppress(Exception):
                    prefix.cache.copy_from(lease.cache, lease.cache.length)
                    prefix.cache.length, prefix.history = lease.cache.length, lease.history
