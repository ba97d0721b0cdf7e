"""One KV cache for several requests, a row of it each, and the plan of one pass over some of these rows.

A row is a `KVCache` of one request like any other, a view on its part of the shared buffers: code that decodes one request need not know
that there are others. Where `forward` is asked for a pass over a row it hands the pass to `RowCache.join`, and the driver of the rows may
run several such passes as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan

JOINED_TOKENS = 64   # of a row in a joined pass; a longer one is a prefill, and all rows would be padded to its length


class SharedCache(KVCache):
    """K/V of several requests. capacity: slots that a request may use; each row has one more, the last: `spare`. No request's passes reach
    it, and what only fills a joined pass up is written there."""

    def __init__(self, n_layers: int, batch: int, capacity: int):
        super().__init__(n_layers, batch, capacity + 1)
        self._parts: dict[tuple[int, int], _Rows] = {}

    @property
    def spare(self) -> int:
        return self.capacity - 1

    def part(self, first: int, last: int) -> KVCache:
        """Rows first … last − 1 as a cache of their own, on the same buffers."""
        found = self._parts.get((first, last))
        return found or self.enter(_Rows(self, first, last))

    def enter(self, part: _Rows) -> _Rows:
        """Keep a view up to date from now on, in the place of an earlier one of the same rows."""
        self._parts[part.first, part.last] = part
        part.renew()
        return part

    def buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        known = self.keys[layer] is not None
        found = super().buffers(layer, key, value)
        if not known:
            self._renew()
        return found

    def grow(self, capacity: int) -> None:
        """At least so many slots for each request; what the rows hold stays."""
        if capacity <= self.spare:
            return
        self.capacity = capacity + 1
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    buffers[layer] = new = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
                    new[:, :, :old.shape[2]] = old
        self._renew()

    def move(self, row: RowCache, to: int) -> None:
        """A request's K/V to another row, which nobody uses."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[to, :, :row.length] = buffer[row.first, :, :row.length]
        del self._parts[row.first, row.last]
        row.first, row.last = to, to + 1
        self.enter(row)

    def _renew(self) -> None:
        for part in self._parts.values():
            part.renew()


class _Rows(KVCache):
    """Rows first … last − 1 of a shared cache."""

    lasting = False

    def __init__(self, shared: SharedCache, first: int, last: int):
        super().__init__(len(shared.keys), last - first, shared.capacity)
        self.shared, self.first, self.last = shared, first, last

    def renew(self) -> None:
        self.capacity = self.shared.capacity
        self.keys = [None if keys is None else keys[self.first:self.last] for keys in self.shared.keys]
        self.values = [None if values is None else values[self.first:self.last] for values in self.shared.values]

    def buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is None:
            self.shared.buffers(layer, key, value)
        return super().buffers(layer, key, value)


class RowCache(_Rows):
    """One request's. join: takes the passes that may be joined with others', as `together` wants them; returns what the pass gives."""

    def __init__(self, shared: SharedCache, row: int, join: Callable[..., Any]):
        super().__init__(shared, row, row + 1)
        self.join = join
        shared.enter(self)

    def joins(self, plan: PassPlan, last_only: bool) -> bool:
        """Whether a pass may be one with other rows': a few tokens behind what is there, a chain or a tree."""
        return not last_only and plan.start is not None and plan.key_positions is None and plan.positions.shape[1] <= JOINED_TOKENS


def joined_plan(plans: Sequence[PassPlan | None], spare: int, device: torch.device) -> PassPlan:
    """One pass over rows that each have a plan of their own, or None: a row that takes no part.

    All rows are padded to the longest. What only fills up is written to the slot `spare`, sees slot 0, and is worth nothing.
    """
    there = [plan for plan in plans if plan is not None]
    width, keys = max(plan.positions.shape[1] for plan in there), max(plan.keys for plan in there)
    slots, last = ([[filler] * width for _ in plans] for filler in (spare, 0))
    for row, plan in enumerate(plans):
        if plan is not None and plan.start is not None:
            count = plan.positions.shape[1]
            slots[row][:count] = last[row][:count] = range(plan.start, plan.start + count)
    written, seen = torch.tensor([slots, last], device=device)   # one copy to the device
    numbers = torch.arange(keys, device=device)[None]
    visible = numbers <= seen[..., None]                         # [R, T, keys]
    positions, key_positions = seen, numbers
    trees = {row: plan for row, plan in enumerate(plans) if plan is not None and not plan.chain}
    if trees:
        positions, key_positions = seen.clone(), numbers.repeat(len(plans), 1)
    for row, plan in trees.items():
        count = plan.positions.shape[1]
        positions[row, :count] = plan.positions[0]
        key_positions[row].scatter_(0, plan.slots[0], plan.positions[0])
        if plan.visible is not None:
            visible[row, :count, :plan.keys] = plan.visible[0, 0]
    return PassPlan(positions, written, keys, visible[:, None], None, key_positions=key_positions)
