"""Tables of rotary angles, which the family's own module computes and which grow with the text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.adapter import ModelSpec
from skipsearch.models.kv_cache import PassPlan

COMPARED_POSITIONS = 4096  # at which `read_angles` compares tables


@dataclass(frozen=True)
class RotaryAngles:
    """The rotary module of models whose angles are multiples of the position."""

    inv_freq: Tensor  # [R / 2], float32
    scaling: float  # of cos and sin

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [B, T], [B, T, R] each, in the dtype of `like`."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(like.dtype), (angles.sin() * self.scaling).to(
            like.dtype
        )


class RotaryTable:
    """cos and sin of every position, for one type of layer.

    The first half of each sin row is negated, so that rotating a pair (a, b) is
    (a, b) · cos + (b, a) · sin."""

    def __init__(self, rotary: Any, layer_type: str | None, spec: ModelSpec):
        self._rotary, self._type_args = rotary, () if layer_type is None else (layer_type,)
        self._prototype = torch.zeros((), dtype=spec.dtype, device=spec.device)
        self._max_positions = spec.context_length
        empty = self._prototype.new_zeros(1, 0, 1, 1)  # [1, positions, 1, R]
        self._cos_sin = (empty, empty)  # replaced together, since other threads read them
        # Captured passes read earlier tables at their old addresses. Together, these are smaller
        # than the latest table.
        self._earlier: list[tuple[Tensor, Tensor]] = []
        self._grow_lock = threading.Lock()

    def read_angles(self) -> RotaryAngles | None:
        """Return what computes the same table without the family's module; None if nothing does.

        The tables are compared to the bit, at many positions of the model's context.
        """
        layer_type = "".join(f"{name}_" for name in self._type_args)
        for prefix in (layer_type, ""):
            inv_freq = getattr(self._rotary, f"{prefix}inv_freq", None)
            scaling = getattr(self._rotary, f"{prefix}attention_scaling", None)
            if isinstance(inv_freq, Tensor) and isinstance(scaling, int | float):
                break
        else:  # perhaps `no_rotation`
            inv_freq, scaling = torch.zeros(self.rotary_dims // 2), 1.0
        angles = RotaryAngles(inv_freq.detach().float(), float(scaling))
        last = (self._max_positions or COMPARED_POSITIONS) - 1
        positions = torch.arange(0, last, max(1, last // COMPARED_POSITIONS))
        positions = torch.cat([positions, torch.tensor([last])])[None]
        own = self._rotary(self._prototype, positions, *self._type_args)
        is_equal = all(map(torch.equal, own, angles(self._prototype, positions)))
        return angles if is_equal else None

    @property
    def rotary_dims(self) -> int:
        """R, the number of dimensions of a head that rotate."""
        position = torch.zeros(1, 1, dtype=torch.long, device=self._prototype.device)
        return int(self._rotary(self._prototype, position, *self._type_args)[0].shape[-1])

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions of the table, [1, positions, 1, R] each."""
        return self._cos_sin

    def grow_to(self, n_positions: int) -> None:
        """Extend the table to `n_positions`, but not beyond the model's context.

        Positions beyond it are never used, and computing them could change other angles. Existing
        angles keep their bits.
        """
        n_positions = min(n_positions, self._max_positions or n_positions)
        with self._grow_lock:
            n_before = self._cos_sin[0].shape[1]
            if n_positions <= n_before:
                return
            positions = torch.arange(n_before, n_positions, device=self._prototype.device)[None]
            cos, sin = (
                x[:, :, None] for x in self._rotary(self._prototype, positions, *self._type_args)
            )
            half = sin.shape[-1] // 2
            sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            if n_before:
                self._earlier.append(self._cos_sin)
                cos = torch.cat([self._cos_sin[0], cos], dim=1)
                sin = torch.cat([self._cos_sin[1], sin], dim=1)
            self._cos_sin = (cos.contiguous(), sin)

    def for_plan(self, plan: PassPlan) -> tuple[Tensor, Tensor]:
        """Return the cos and sin of a pass, [B or 1, T, 1, R] each."""
        cos, sin = self._cos_sin
        if plan.is_chain and plan.first_slot is not None:
            t = plan.positions.shape[1]
            return cos.narrow(1, plan.first_slot, t), sin.narrow(1, plan.first_slot, t)
        b, t = plan.positions.shape
        flat = plan.positions.flatten()
        return tuple(x.index_select(1, flat).view(b, t, 1, -1) for x in (cos, sin))  # type: ignore[return-value]


def half_order_rows(
    n_heads: int, n_kv_heads: int, head_dim: int, rotary_dims: int, device: torch.device
) -> Tensor:
    """Return the order of the rows of q, k and v that turns interleaved RoPE into half RoPE.

    In this order, each head of q and k begins with the first elements of all neighbour pairs, and
    their second elements follow. Products of q and k do not change, and rotating pairs of halves
    has the same effect as rotating neighbour pairs had.
    """
    head = torch.arange(head_dim, device=device)
    head = torch.cat([head[:rotary_dims:2], head[1:rotary_dims:2], head[rotary_dims:]])
    starts = torch.arange(n_heads + n_kv_heads, device=device)[:, None] * head_dim
    rest = torch.arange(
        (n_heads + n_kv_heads) * head_dim, (n_heads + 2 * n_kv_heads) * head_dim, device=device
    )
    return torch.cat([(starts + head).flatten(), rest])


def no_rotation(rotary: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a replacement of a rotary module that rotates by zero."""

    def zero_angles(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(like, positions)
        return torch.ones_like(cos), torch.zeros_like(sin)

    return zero_angles


def double_angles(rotary: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a replacement that repeats the angles of a rotary module with one for each pair."""

    def doubled(like: Tensor, positions: Tensor, *rest: str) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(like, positions, *rest)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    for name in ("inv_freq", "attention_scaling"):  # for `RotaryTable.read_angles`
        setattr(doubled, name, getattr(rotary, name, None))
    return doubled
