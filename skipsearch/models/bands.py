"""Which keys the rows of a chain pass may see, as additive masks that are views: nothing is computed that grows with the context.

Row i of a pass of T rows sees all slots up to the one it writes itself, or the last `window` of them. The pattern only moves along
with the pass, so one buffer serves every start: as many columns before the pass's own as the cache has, and some hidden ones behind.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from skipsearch.cache import PassPlan

BANDED_ROWS = 64  # of a buffer that is kept; a longer pass is a prefill and pays for its own
# Exact passes look at whole blocks of so many keys, so as many hidden columns stand behind the pass's own. torch's CPU kernel sums over 512
# at once; on some CPUs a shorter block is summed in another order, and bits would depend on how far the cache is filled.
KEY_BLOCK = 512


class Bands:
    """For one dtype and device, for any number of threads. `room` grows to the largest cache that was made.

    A band is kept under the capacity that it was made for: another thread may ask for more room between two lines of `of`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.capacity = dtype, device, 0
        self._kept: dict[tuple[int, int, int | None], Tensor] = {}
        self._growing = threading.Lock()

    def room(self, capacity: int) -> None:
        with self._growing:
            if capacity > self.capacity:
                self.capacity, self._kept = capacity, {}

    def of(self, plan: PassPlan, window: int | None) -> Tensor:
        """[1, 1, T, plan.keys] of a chain pass, 0 where a row may look and −inf where it may not."""
        rows, keys = plan.positions.shape[1], plan.keys
        assert plan.start is not None
        if rows > BANDED_ROWS or keys > plan.start + rows + KEY_BLOCK:
            return self._band(rows, plan.start, keys - rows - plan.start, window)
        capacity = self.capacity
        band = self._kept.get((capacity, rows, window))
        if band is None:
            band = self._kept[capacity, rows, window] = self._band(rows, capacity, KEY_BLOCK, window)
        return band.narrow(-1, capacity - plan.start, keys)

    def _band(self, rows: int, before: int, after: int, window: int | None) -> Tensor:
        own = torch.arange(before, before + rows, device=self.device)[:, None]
        distance = own - torch.arange(before + rows + after, device=self.device)  # [T, columns]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))[None, None]
