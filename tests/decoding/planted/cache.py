"""Bugs of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from helpers.tiny import tiny_model_and_reference

from skipsearch.decoding import loop
from skipsearch.decoding.prefix_cache import Lease
from skipsearch.models.kv_cache import KVCache

from ..checks import MASKS, Drafting, check_greedy, check_streams_side_by_side, padded_passes
from .register import caught_by, planted


def check_greedy_on_padded_passes() -> None:
    """Check passes that see a whole block of slots, hidden and unwritten ones included.

    They must change nothing.
    """
    world = tiny_model_and_reference()  # loaded as ever: the check at load plans its passes itself
    with padded_passes():
        check_greedy([Drafting(MASKS[0])], world=world)


@planted(check_greedy_on_padded_passes, KVCache, "write")
def nan_left_in_an_unwritten_slot(real, self, layer, key, value, plan):
    """Buffers are not zeroed: an unwritten slot may be NaN, and a masked NaN is still NaN."""
    if self.keys[layer] is None:
        shape = (self.batch_size, key.shape[1], self.capacity, key.shape[-1])
        self.keys[layer], self.values[layer] = (
            key.new_full(shape, torch.nan),
            value.new_full(shape, torch.nan),
        )
    return real(self, layer, key, value, plan)


@planted(check_greedy, KVCache, "write")
def stale_kv_at_accepted_positions(real, self, layer, key, value, plan):
    """The verify pass does not overwrite the draft's K/V: accepted tokens keep them."""
    buffers = self.keys[layer], self.values[layer]
    slots = plan.slots[0]
    is_verify = len(slots) > 1 and int(slots[0]) > 0
    drafted = [b[:, :, slots[:-1]].clone() for b in buffers if b is not None] if is_verify else []
    seen = tuple(t.clone() for t in real(self, layer, key, value, plan))
    for buffer, old in zip(buffers, drafted, strict=False):
        assert buffer is not None
        if bool(old.any()):
            buffer[:, :, slots[:-1]] = old
    return seen[0], seen[1]


@planted(check_greedy, KVCache, "write")
def full_model_kv_missing(real, self, layer, key, value, plan):
    """The verify pass writes no K/V in the attention layers that the draft skips."""
    keys, values = (t.clone() for t in real(self, layer, key, value, plan))
    if key.shape[2] > 1 and int(plan.slots[0, 0]) > 0 and layer in MASKS[0].attn:
        for buffer in (self.keys[layer], self.values[layer]):
            assert buffer is not None
            buffer[:, :, plan.slots[0]] = 0
    return keys, values


@planted(check_greedy, loop.DecodeLoop, "_run_round")
def length_advanced_past_what_stands(real, self, request, room):
    """The bonus token counts as committed, but its K/V are not written yet."""
    tokens = real(self, request, room)
    request.ctx.cache.length += len(tokens) > 1
    return tokens


@planted(check_greedy, loop.DecodeLoop, "_run_round")
def rejected_tokens_stay_visible(real, self, request, room):
    """The cache is not rolled back: its length grows by every verified token, rejected ones too."""
    before, drafted = request.ctx.cache.length, request.stats.drafted
    tokens = real(self, request, room)
    request.ctx.cache.length = before + 1 + request.stats.drafted - drafted
    return tokens


@caught_by(check_streams_side_by_side)
def one_cache_for_two_streams() -> Iterator[None]:
    real = loop.DecodeLoop.lease

    @contextmanager
    def shared(self: loop.DecodeLoop, *asked: Any) -> Iterator[Lease]:
        with real(self, *asked) as lease:
            self.idle_caches.append(lease.cache)
            yield lease

    with patch.object(loop.DecodeLoop, "lease", shared):
        yield
