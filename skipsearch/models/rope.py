"""Rotary angles, looked up: the family's own module fills a table once, as long as the largest cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skipsearch.cache import PassPlan
from skipsearch.models.spec import ModelSpec


class Angles:
    """cos and sin of every position for one kind of layer. The first half of each sin row is negated: rotating a pair (a, b) is then
    (a, b) · cos + (b, a) · sin."""

    def __init__(self, rotary: Any, layer_type: str | None, spec: ModelSpec):
        self._rotary, self._of_type = rotary, () if layer_type is None else (layer_type,)
        self._like, self._most = torch.zeros((), dtype=spec.dtype, device=spec.device), spec.context
        none = self._like.new_zeros(1, 0, 1, 1)   # [1, positions, 1, R]
        self._table = (none, none)                # cos and sin, replaced together: another thread may be reading them
        self._growing = threading.Lock()

    @property
    def width(self) -> int:
        """R: dimensions of a head that are turned."""
        return int(self._rotary(self._like, torch.zeros(1, 1, dtype=torch.long, device=self._like.device), *self._of_type)[0].shape[-1])

    @property
    def table(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) of every position that is known, [1, positions, 1, R]."""
        return self._table

    def room(self, positions: int) -> None:
        """Know the angles of this many positions. Those past the model's context are never asked for, and might change the others'."""
        positions = min(positions, self._most or positions)
        with self._growing:
            if positions <= self._table[0].shape[1]:
                return
            places = torch.arange(positions, device=self._like.device)[None]
            cos, sin = (x[:, :, None] for x in self._rotary(self._like, places, *self._of_type))
            half = sin.shape[-1] // 2
            self._table = (cos.contiguous(), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1))

    def of(self, plan: PassPlan) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B or 1, T, 1, R] of a pass."""
        cos, sin = self._table
        if plan.chain and plan.start is not None:
            t = plan.positions.shape[1]
            return cos.narrow(1, plan.start, t), sin.narrow(1, plan.start, t)
        b, t = plan.positions.shape
        flat = plan.positions.flatten()
        return tuple(x.index_select(1, flat).view(b, t, 1, -1) for x in (cos, sin))  # type: ignore[return-value]


def by_halves(heads: int, kv_heads: int, size: int, turned: int, device: torch.device) -> Tensor:
    """Rows of q, k and v in an order in which the first of each pair of neighbours come first, then the second ones: products of q and k
    stay as they are, and turning pairs of halves is then what turning neighbours was."""
    head = torch.arange(size, device=device)
    head = torch.cat([head[:turned:2], head[1:turned:2], head[turned:]])
    starts = torch.arange(heads + kv_heads, device=device)[:, None] * size
    rest = torch.arange((heads + kv_heads) * size, (heads + 2 * kv_heads) * size, device=device)
    return torch.cat([(starts + head).flatten(), rest])


def still(rotary: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Angles of layers that turn nothing, in the shape of those that do."""
    def angles(like: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(like, places)
        return torch.ones_like(cos), torch.zeros_like(sin)

    return angles
