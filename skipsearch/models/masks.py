"""What a pass may see, in the forms that attention modules take: a sliding window, an additive mask, ALiBi's bias.

Each is built once for a pass, whatever the number of layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skipsearch.cache import PassPlan


def key_positions(plan: PassPlan) -> Tensor:
    """The position of the token in each slot, [B or 1, keys] int64.

    A slot written before the pass holds the token of its own number, unless the plan knows better. The pass's tokens say where they
    stand: siblings of a tree share a position, and a replay writes behind the text what stands inside it.
    """
    if plan.key_positions is not None:
        return plan.key_positions
    slots = torch.arange(plan.keys, device=plan.positions.device)[None]  # [1, keys]
    if plan.positions is plan.slots:
        return slots
    return slots.expand(len(plan.slots), -1).scatter(1, plan.slots, plan.positions)


def windowed(plan: PassPlan, window: int | None) -> Tensor | None:
    """`plan.visible` less the keys that lie `window` positions or more behind: [B or 1, 1, T, keys] bool, or None as there."""
    if window is None or plan.keys <= window:
        return plan.visible
    near = key_positions(plan)[:, None, None] > (plan.positions - window)[:, None, :, None]
    return near & visible(plan)


def visible(plan: PassPlan) -> Tensor:
    """`plan.visible` in full, also where the plan leaves the plain causal pattern to the kernel: [B or 1, 1, T, keys] bool."""
    if plan.visible is not None:
        return plan.visible
    slots = torch.arange(plan.keys, device=plan.slots.device)
    return (slots <= plan.slots[:, :, None])[:, None]


def additive(mask: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A bool mask as what is added to attention scores: 0 (or `bias`, [B or 1, heads, 1, keys]) where it may look."""
    shown = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
    return torch.where(mask, shown, torch.finfo(dtype).min)


def alibi(positions: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Falcon's ALiBi, a slope for each head times the position of the key: [B, keys] -> [B, heads, 1, keys].

    Rounded to bfloat16 on the way, as the models were trained. Source: Press et al. 2022; transformers, build_alibi_tensor.
    """
    power = 2 ** math.floor(math.log2(heads))
    exponents = [-8 * (i + 1) / power for i in range(power)] + [-4 * (2 * i + 1) / power for i in range(heads - power)]
    slopes = torch.tensor([2.0 ** e for e in exponents], device=positions.device)
    return (slopes.bfloat16()[None, :, None, None] * positions[:, None, None]).to(dtype)
