"""Which keys the rows of a chain pass may see, as additive masks that are views: nothing is computed that grows with the context.

Row i of a pass of T rows sees all slots up to the one it writes itself, or the last `window` of them. The pattern only moves along
with the pass, so one buffer [T, capacity + T] serves every start: the last start + T of its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skipsearch.cache import PassPlan

MOST_ROWS = 64  # of a buffer that is kept; a longer pass is a prefill and pays for its own


class Bands:
    """For one dtype and device. `room` grows to the largest cache that was made."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.capacity = dtype, device, 0
        self._kept: dict[tuple[int, int | None], Tensor] = {}

    def room(self, capacity: int) -> None:
        if capacity > self.capacity:
            self.capacity = capacity
            self._kept.clear()

    def of(self, plan: PassPlan, window: int | None) -> Tensor:
        """[1, 1, T, plan.keys] of a chain pass, 0 where a row may look and −inf where it may not."""
        rows = plan.positions.shape[1]
        if rows > MOST_ROWS:
            return self._band(rows, plan.keys, window)
        band = self._kept.get((rows, window))
        if band is None:
            band = self._kept[rows, window] = self._band(rows, self.capacity + rows, window)
        return band[..., band.shape[-1] - plan.keys:]

    def _band(self, rows: int, keys: int, window: int | None) -> Tensor:
        behind = torch.arange(keys - rows, keys, device=self.device)[:, None] - torch.arange(keys, device=self.device)  # [T, keys]
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        return torch.zeros(rows, keys, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))[None, None]
