"""One KV cache with a row for each of several requests, and the plan of a pass over several rows.

Here a row is one request's part of the cache. The cache of a request is a `RowCache`, a view of one
row of the shared buffers. Code that decodes one request need not know the others: `forward` gives
the pass of a request to `RowCache.submit`, and the batch may run several such passes as one.

All rows have the capacity of the longest text. A text that exceeds a limit leaves the shared cache,
and continues in separate buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.kv_cache import KVCache, PassPlan, resize, round_slots

# Most tokens of a row in a joined pass. A longer pass is a prefill; all rows would be padded to it.
MAX_JOINED_TOKENS = 64


class SharedCache(KVCache):
    """The K/V of several requests, one row each.

    Each row has one slot more than `capacity`, the `padding_slot`. The padding of merged passes is
    written to it, and no pass of a request reads it.
    """

    def __init__(self, n_layers: int, n_rows: int, capacity: int, limit: int | None = None):
        """Create an empty cache.

        capacity: slots that a request may use. limit: a request that needs more slots leaves the
        cache; None: no limit.
        """
        super().__init__(n_layers, n_rows, capacity + 1)
        self.limit = limit
        self._views: dict[tuple[int, int], _CacheView] = {}

    @property
    def padding_slot(self) -> int:
        return self.capacity - 1

    def view(self, first_row: int, end_row: int) -> KVCache:
        """Return rows first_row … end_row − 1 as a cache, on the same buffers."""
        view = self._views.get((first_row, end_row))
        return view or self.register(_CacheView(self, first_row, end_row))

    def register(self, view: _CacheView) -> _CacheView:
        """Add a view that is updated if buffers change. It replaces an earlier view of its rows."""
        self._views[view.first_row, view.end_row] = view
        view.refresh()
        return view

    def get_buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        existed = self.keys[layer] is not None
        buffers = super().get_buffers(layer, key, value)
        if not existed:
            self._refresh_views()
        return buffers

    def reserve(self, slots: int) -> None:
        """Grow all rows to at least `slots` slots. If memory runs out, no layer changes."""
        if slots <= self.padding_slot:
            return
        capacity = round_slots(slots) + 1
        larger = [
            [None if old is None else resize(old, capacity) for old in buffers]
            for buffers in (self.keys, self.values)
        ]
        self._set_capacity(capacity)
        self.keys, self.values = larger
        self._refresh_views()

    def leave(self, row: RowCache) -> None:
        """Remove the view of a row whose request no longer uses it."""
        self._views.pop((row.first_row, row.end_row), None)

    def move_row(self, row_cache: RowCache, target_row: int) -> None:
        """Copy a request's K/V to a free row, and move its view to this row."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[target_row, :, : row_cache.length] = buffer[
                    row_cache.first_row, :, : row_cache.length
                ]
        del self._views[row_cache.first_row, row_cache.end_row]
        row_cache.first_row, row_cache.end_row = target_row, target_row + 1
        self.register(row_cache)

    def _refresh_views(self) -> None:
        for view in self._views.values():
            view.refresh()


class _CacheView(KVCache):
    """A view of rows first_row … end_row − 1 of a shared cache."""

    stable_buffers = False

    def __init__(self, shared_cache: SharedCache, first_row: int, end_row: int):
        super().__init__(len(shared_cache.keys), end_row - first_row, shared_cache.capacity)
        self.shared_cache, self.first_row, self.end_row = shared_cache, first_row, end_row

    def refresh(self) -> None:
        self._set_capacity(self.shared_cache.capacity)
        self.keys = [
            None if keys is None else keys[self.first_row : self.end_row]
            for keys in self.shared_cache.keys
        ]
        self.values = [
            None if values is None else values[self.first_row : self.end_row]
            for values in self.shared_cache.values
        ]

    def get_buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is None:
            self.shared_cache.get_buffers(layer, key, value)
        return super().get_buffers(layer, key, value)


class RowCache(_CacheView):
    """The cache of one request: a view of one row of a shared cache."""

    def __init__(self, shared_cache: SharedCache, row_index: int, submit: Callable[..., Any]):
        super().__init__(shared_cache, row_index, row_index + 1)
        self.submit = submit  # runs a pass, perhaps with passes of other rows
        self.alone = False  # whether it left the shared cache and has separate buffers
        shared_cache.register(self)

    def can_join(self, plan: PassPlan, last_only: bool) -> bool:
        """Return whether a pass may be merged with those of other rows: a short chain or tree."""
        return (
            not self.alone
            and not last_only
            and plan.first_slot is not None
            and plan.key_positions is None
            and plan.positions.shape[1] <= MAX_JOINED_TOKENS
        )

    def reserve(self, slots: int) -> None:
        """Grow the shared cache to `slots` slots. Beyond its limit, leave it and grow alone."""
        if (
            not self.alone
            and self.shared_cache.limit is not None
            and slots > self.shared_cache.limit
        ):
            self._leave(slots)
        if self.alone:
            KVCache.reserve(self, slots)
        else:
            self.shared_cache.reserve(slots)

    def get_buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (
            KVCache.get_buffers(self, layer, key, value)
            if self.alone
            else super().get_buffers(layer, key, value)
        )

    def _leave(self, slots: int) -> None:
        """Copy all K/V, also those of draft tokens, to separate buffers, and leave the cache."""
        capacity = round_slots(slots)
        buffers = [
            [None if old is None else resize(old, capacity) for old in buffers]
            for buffers in (self.keys, self.values)
        ]
        self.shared_cache.leave(self)
        self._set_capacity(capacity)
        self.keys, self.values = buffers
        self.alone = True


def batch_plans(
    plans: Sequence[PassPlan | None], padding_slot: int, device: torch.device
) -> PassPlan:
    """Return the plan of one pass over all rows, from the plan of each row.

    plans: None for a row without tokens. All rows are padded to the longest. Padding is written to
    the slot `padding_slot` and attends to slot 0; its logits are meaningless.
    """
    joined = [plan for plan in plans if plan is not None]
    n_tokens = max(plan.positions.shape[1] for plan in joined)
    n_keys = max(plan.n_keys for plan in joined)
    slots, last_visible = ([[padding] * n_tokens for _ in plans] for padding in (padding_slot, 0))
    for row, plan in enumerate(plans):
        if plan is not None and plan.first_slot is not None:
            n_row_tokens = plan.positions.shape[1]
            slots[row][:n_row_tokens] = last_visible[row][:n_row_tokens] = range(
                plan.first_slot, plan.first_slot + n_row_tokens
            )
    # Copy both to the device at once.
    write_slots, last_visible_slots = torch.tensor([slots, last_visible], device=device)
    slot_indices = torch.arange(n_keys, device=device)[None]
    visible = slot_indices <= last_visible_slots[..., None]  # [R, T, keys]
    positions, key_positions = last_visible_slots, slot_indices
    trees = {row: plan for row, plan in enumerate(plans) if plan is not None and not plan.is_chain}
    if trees:
        positions, key_positions = last_visible_slots.clone(), slot_indices.repeat(len(plans), 1)
    for row, plan in trees.items():
        n_row_tokens = plan.positions.shape[1]
        positions[row, :n_row_tokens] = plan.positions[0]
        key_positions[row].scatter_(0, plan.slots[0], plan.positions[0])
        if plan.mask is not None:
            visible[row, :n_row_tokens, : plan.n_keys] = plan.mask[0, 0]
    return PassPlan(
        positions, write_slots, n_keys, visible[:, None], None, key_positions=key_positions
    )
