"""Additive causal masks of chain passes, as views (on a GPU, copies) of a cached buffer.

On a CPU, no computation of a pass therefore grows with the context. Row i of a pass of T rows
attends to all slots up to its own, or to the last `window` of them. The pattern shifts with the
first slot of the pass, so one buffer serves every first slot, and its first rows a pass of fewer
rows. Before the columns of the pass itself, the buffer has as many columns as the cache has slots;
after them, it has some hidden columns.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from skipsearch.models.kv_cache import PassPlan

MAX_CACHED_ROWS = 64  # a longer pass is a prefill, whose mask is not cached
# Hidden columns of a cached buffer after those of the pass. Exact passes
# (engine/batch_invariant.py) end at a multiple of this many keys. The mask of a pass with more
# hidden keys is not cached.
MAX_HIDDEN_KEYS = 512


class CausalMaskCache:
    """A cache of masks for one dtype and device, which any number of threads may share.

    The capacity is a part of each buffer's key, because another thread may call `grow_to` while
    `for_plan` runs.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.capacity = dtype, device, 0
        self._cached: dict[tuple[int, int | None], Tensor] = {}
        self._grow_lock = threading.Lock()

    def grow_to(self, capacity: int) -> None:
        with self._grow_lock:
            if capacity > self.capacity:
                self.capacity, self._cached = capacity, {}

    def for_plan(self, plan: PassPlan, window: int | None) -> Tensor:
        """Return the mask of a chain pass, [1, 1, T, plan.n_keys]: 0 if visible, else −inf."""
        rows, keys = plan.positions.shape[1], plan.n_keys
        assert plan.first_slot is not None
        if rows > MAX_CACHED_ROWS or keys > plan.first_slot + rows + MAX_HIDDEN_KEYS:
            return self._make_mask(rows, plan.first_slot, keys - rows - plan.first_slot, window)
        capacity = self.capacity
        buffer = self._cached.get((capacity, window))
        if buffer is None:
            buffer = self._make_mask(MAX_CACHED_ROWS, capacity, MAX_HIDDEN_KEYS, window)
            self._cached[capacity, window] = buffer
        mask = buffer[:, :, :rows].narrow(-1, capacity - plan.first_slot, keys)
        # CUDA kernels read 16 bytes at once, so a mask must not begin in between.
        return (
            mask if mask.device.type == "cpu" else mask.clone(memory_format=torch.contiguous_format)
        )

    def _make_mask(self, n_rows: int, n_before: int, n_after: int, window: int | None) -> Tensor:
        rows = torch.arange(n_before, n_before + n_rows, device=self.device)[:, None]
        columns = torch.arange(n_before + n_rows + n_after, device=self.device)
        distance = rows - columns  # [T, columns]
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))[None, None]
