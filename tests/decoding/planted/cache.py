"""Mistakes: the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from helpers.tiny import small_world
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.decoding import loop

from ..checks import MASKS, Drafting, check_greedy, check_streams_side_by_side
from .register import caught_by


def check_greedy_on_padded_passes() -> None:
    """A pass may look at a whole block of slots, hidden ones and never written ones among them, and change nothing."""
    world = small_world()   # loaded as ever: the check at load plans its passes itself
    with padded_passes():
        check_greedy([Drafting(MASKS[0])], world=world)


@contextmanager
def padded_passes() -> Iterator[None]:
    """No bug: an engine with fixed shapes shows every pass a multiple of 64 slots and masks what it must not see."""
    def chain(self: Planner, start: int, tokens: int, batch: int = 1) -> PassPlan:
        slots = self.slots[:, start:start + tokens].expand(batch, tokens)
        keys = -(-(start + tokens) // 64) * 64
        visible = (self.slots[:, :keys] <= slots[0][:, None])[None, None]
        return PassPlan(slots, slots, keys, visible, start)

    with patch.object(Planner, "chain", chain):
        yield


@caught_by(check_greedy_on_padded_passes)
def nan_left_in_an_unwritten_slot() -> Iterator[None]:
    """Buffers from torch.empty: what no pass has written may be NaN, and a masked NaN is still a NaN."""
    real = KVCache.write

    def write(self: KVCache, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is None:
            shape = (self.batch, key.shape[1], self.capacity, key.shape[-1])
            self.keys[layer], self.values[layer] = key.new_full(shape, torch.nan), value.new_full(shape, torch.nan)
        return real(self, layer, key, value, plan)

    with patch.object(KVCache, "write", write):
        yield


@caught_by(check_greedy)
def stale_kv_at_accepted_positions() -> Iterator[None]:
    """The verify pass does not overwrite what the draft wrote: accepted tokens keep the draft's K/V."""
    real = KVCache.write

    def write(self: KVCache, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
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

    with patch.object(KVCache, "write", write):
        yield


@caught_by(check_greedy)
def full_model_kv_missing() -> Iterator[None]:
    """The verify pass leaves no K/V behind in the attention layers that the draft skips."""
    real = KVCache.write

    def write(self: KVCache, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        keys, values = (t.clone() for t in real(self, layer, key, value, plan))
        if key.shape[2] > 1 and int(plan.slots[0, 0]) > 0 and layer in MASKS[0].attn:
            for buffer in (self.keys[layer], self.values[layer]):
                assert buffer is not None
                buffer[:, :, plan.slots[0]] = 0
        return keys, values

    with patch.object(KVCache, "write", write):
        yield


@caught_by(check_greedy)
def length_advanced_past_what_stands() -> Iterator[None]:
    """The bonus token counts as committed, but nobody has written its K/V yet."""
    real = loop.DecodeLoop._round

    def advanced(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        tokens = real(self, request, room)
        request.ctx.cache.length += len(tokens) > 1
        return tokens

    with patch.object(loop.DecodeLoop, "_round", advanced):
        yield


@caught_by(check_greedy)
def rejected_tokens_stay_visible() -> Iterator[None]:
    """The cache is not rolled back: length moves over every verified token, rejected ones included."""
    real = loop.DecodeLoop._round

    def kept(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        before, drafted = request.ctx.cache.length, request.stats.drafted
        tokens = real(self, request, room)
        request.ctx.cache.length = before + 1 + request.stats.drafted - drafted
        return tokens

    with patch.object(loop.DecodeLoop, "_round", kept):
        yield


@caught_by(check_streams_side_by_side)
def one_cache_for_two_streams() -> Iterator[None]:
    real = loop.DecodeLoop._room_for

    def shared(self: loop.DecodeLoop, tokens: int) -> tuple[KVCache, Planner]:
        lent = real(self, tokens)
        self.spare.append(lent)
        return lent

    with patch.object(loop.DecodeLoop, "_room_for", shared):
        yield
