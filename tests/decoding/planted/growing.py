"""Bugs of caches that grow."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import torch

from skipsearch.engine import RowCache, shared_cache
from skipsearch.models import kv_cache
from skipsearch.models.kv_cache import KVCache

from ..growing_checks import (
    check_growing_batches,
    check_growing_caches,
    check_growing_padded_passes,
    check_growing_sessions,
    check_leaving_rows,
)
from .register import caught_by, planted


@caught_by(check_growing_caches)
def a_larger_cache_without_what_was_there() -> Iterator[None]:
    with patch.object(
        kv_cache,
        "resize",
        lambda buffer, slots: buffer.new_zeros(*buffer.shape[:2], slots, buffer.shape[3]),
    ):
        yield


@planted(check_growing_padded_passes, kv_cache, "resize")
def nan_in_the_slots_that_came_later(real, buffer, slots):
    larger = real(buffer, slots)
    larger[:, :, buffer.shape[2] :] = torch.nan
    return larger


@planted(check_growing_caches, KVCache, "get_buffers")
def only_what_is_committed_is_copied(real, self, layer, key, value):
    """A cache that grows between two draft steps loses the earlier steps.

    A verify pass resumes from them, or the draft itself does.
    """
    old = self.keys[layer]
    keys, values = real(self, layer, key, value)
    if old is not None and keys is not old:
        for buffer in (keys, values):
            buffer[:, :, max(0, self.length - 1) :] = 0
    return keys, values


@caught_by(check_growing_sessions)
def a_smaller_cache_that_counts_what_it_lost() -> Iterator[None]:
    """A cache that shrinks loses the last committed tokens, and its length still counts them."""
    real = KVCache.shrink
    with patch.object(KVCache, "shrink", lambda self, slots: real(self, slots // 2)):
        yield


@caught_by(check_growing_batches)
def rows_that_keep_the_smaller_buffers() -> Iterator[None]:
    """The shared cache grows, and its rows still read and write the old buffers."""
    with patch.object(
        shared_cache.SharedCache,
        "_refresh_views",
        lambda self: [part.renew() for part in self._parts.values() if part.keys[0] is None],
    ):
        yield


@planted(check_leaving_rows, RowCache, "_leave")
def row_that_leaves_without_its_kv(real, self, slots):
    real(self, slots)
    for buffer in (*self.keys, *self.values):
        if buffer is not None:
            buffer.zero_()


@planted(check_leaving_rows, RowCache, "can_join")
def row_that_left_still_takes_part(real, self, *asked):
    """Its passes join those of the others, in a row that now belongs to another request."""
    alone, self.alone = self.alone, False
    try:
        return real(self, *asked)
    finally:
        self.alone = alone
