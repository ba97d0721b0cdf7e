"""Masks of a pass in the forms that attention modules take: a sliding window, an additive mask,
ALiBi's bias.

Each is built once for a pass, whatever the number of layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skipsearch.models.kv_cache import PassPlan


def get_key_positions(plan: PassPlan) -> Tensor:
    """Return the position of the token in each slot, [B or 1, n_keys] int64.

    Slot i holds token i if it was written before this pass, unless the plan says otherwise. For the
    pass's own slots the plan gives the positions: siblings of a tree share one, and a replay writes
    after the text what has a position inside it."""
    if plan.key_positions is not None:
        return plan.key_positions
    slots = torch.arange(plan.n_keys, device=plan.positions.device)[None]  # [1, n_keys]
    if plan.positions is plan.slots:
        return slots
    return slots.expand(len(plan.slots), -1).scatter(1, plan.slots, plan.positions)


def with_window(plan: PassPlan, window: int | None) -> Tensor | None:
    """Return the plan's mask without keys that are `window` or more positions earlier:
    [B or 1, 1, T, n_keys] bool, or None with the same meaning as in `plan.mask`.
    """
    if window is None or plan.n_keys <= window:
        return plan.mask
    in_window = get_key_positions(plan)[:, None, None] > (plan.positions - window)[:, None, :, None]
    return in_window & full_mask(plan)


def full_mask(plan: PassPlan) -> Tensor:
    """Return the plan's mask, written out also if the plan leaves the causal pattern to the kernel:
    [B or 1, 1, T, n_keys] bool.
    """
    if plan.mask is not None:
        return plan.mask
    slots = torch.arange(plan.n_keys, device=plan.slots.device)
    return (slots <= plan.slots[:, :, None])[:, None]


def make_additive(mask: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Convert a bool mask to what is added to attention scores: 0, or `bias` [B or 1, heads, 1,
    n_keys], for visible keys, and the lowest finite number for the others.
    """
    visible = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(mask, visible, torch.finfo(dtype).min)


def make_alibi_bias(positions: Tensor, n_heads: int, dtype: torch.dtype) -> Tensor:
    """Return Falcon's ALiBi, the slope of each head times the position of the key: positions
    [B, n_keys] -> [B, heads, 1, n_keys].

    It is rounded to bfloat16 on the way, as in training. Source: Press et al. 2022; transformers,
    build_alibi_tensor."""
    power = 2 ** math.floor(math.log2(n_heads))
    exponents = [-8 * (i + 1) / power for i in range(power)] + [
        -4 * (2 * i + 1) / power for i in range(n_heads - power)
    ]
    slopes = torch.tensor([2.0**e for e in exponents], device=positions.device)
    return (slopes.bfloat16()[None, :, None, None] * positions[:, None, None]).to(dtype)
