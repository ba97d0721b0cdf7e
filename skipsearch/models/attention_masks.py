"""Attention masks of a pass in the forms that modules need: sliding window, additive mask, ALiBi.

Each mask is built once for a pass and shared by all layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skipsearch.models.kv_cache import PassPlan


def get_key_positions(plan: PassPlan) -> Tensor:
    """Return the position of the token in each slot, [B or 1, n_keys] int64.

    Slots that were written before this pass hold token i in slot i, unless the plan has other
    positions. For the slots that the pass writes, the plan gives the positions: siblings of a tree
    share a position, and a replay writes tokens after the text that have positions within it."""
    if plan.key_positions is not None:
        return plan.key_positions
    slots = torch.arange(plan.n_keys, device=plan.positions.device)[None]  # [1, n_keys]
    if plan.positions is plan.slots:
        return slots
    return slots.expand(len(plan.slots), -1).scatter(1, plan.slots, plan.positions)


def with_window(plan: PassPlan, window: int | None) -> Tensor | None:
    """Return the plan's mask without keys that are `window` or more positions earlier.

    [B or 1, 1, T, n_keys] bool, or None with the same meaning as in `plan.mask`.
    """
    if window is None or plan.n_keys <= window:
        return plan.mask
    in_window = get_key_positions(plan)[:, None, None] > (plan.positions - window)[:, None, :, None]
    return in_window & full_mask(plan)


def full_mask(plan: PassPlan) -> Tensor:
    """Return the plan's mask, [B or 1, 1, T, n_keys] bool.

    If the plan has none, because the kernel adds the causal pattern, the mask is built.
    """
    if plan.mask is not None:
        return plan.mask
    slots = torch.arange(plan.n_keys, device=plan.slots.device)
    return (slots <= plan.slots[:, :, None])[:, None]


def make_additive(mask: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Convert a bool mask to an additive mask for attention scores.

    Visible keys get 0, or `bias` [B or 1, heads, 1, n_keys]; other keys get the lowest finite
    number.
    """
    visible = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(mask, visible, torch.finfo(dtype).min)


def make_alibi_bias(positions: Tensor, n_heads: int, dtype: torch.dtype) -> Tensor:
    """Return Falcon's ALiBi bias: positions [B, n_keys] -> [B, heads, 1, n_keys].

    It is the slope of each head times the position of the key, rounded to bfloat16 as in training.
    Source: Press et al. 2022; transformers, build_alibi_tensor.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    exponents = [-8 * (i + 1) / power for i in range(power)] + [
        -4 * (2 * i + 1) / power for i in range(n_heads - power)
    ]
    slopes = torch.tensor([2.0**e for e in exponents], device=positions.device)
    return (slopes.bfloat16()[None, :, None, None] * positions[:, None, None]).to(dtype)
