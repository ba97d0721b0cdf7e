"""Passes whose bits do not depend on how many tokens are in them: always the same shape, whoever asks.

A matrix product over eight rows rounds otherwise than eight products over one, so in bfloat16 and float16 a verify pass now and then
prefers another token than one-token decoding would: in every published system. Here every pass of the full model, prefill included, has
ROWS rows and a whole number of KEY_BLOCKs of keys. A row then gets the same bits wherever it stands, whatever its neighbours are, and
however far the cache is filled; so greedy text is the same with any profile and without one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine.forward import Tap, forward, looped
from skipsearch.models.bands import KEY_BLOCK
from skipsearch.models.spec import ModelAdapter

Watch = Callable[[PassPlan, int], Tap | None]

ROWS = 8        # kernels keep a row's bits at 4, 8 and 16 of them, and not at 9


def exact_forward(model: ModelAdapter, tokens: Tensor, cache: KVCache, planner: Planner, start: int, last_only: bool = False,
                  watch: Watch | None = None) -> Tensor:
    """The full model over tokens [1, T] behind `start` committed ones: logits [1, T, V], or [1, 1, V] with last_only.

    watch: asked for each piece, with its plan and how many of its rows are no padding, what its hidden states are shown to.
    The cache holds whole blocks of KEY_BLOCK keys, and ROWS − 1 slots more than the tokens, for rows that only fill up a pass; nothing ever
    sees what they write. An engine whose rows have the same bits in any pass, as native, takes all of them in one.
    """
    count, parts = tokens.shape[1], []
    if is_steady(model):
        plan = planner.chain(start, count)
        return forward(model, tokens, cache, plan, last_only=last_only, tap=None if watch is None else watch(plan, count))
    for at in range(0, count, ROWS):
        piece = tokens[:, at:at + ROWS]
        filled = torch.nn.functional.pad(piece, (0, ROWS - piece.shape[1]))
        is_last = at + ROWS >= count
        plan = padded(planner, start + at, model.spec.context)
        if watch is not None and (tap := watch(plan, piece.shape[1])) is not None:
            looped(model, filled, cache, plan, last_only=True, tap=tap)   # a pass that shows its states may round otherwise: it only shows
        if last_only and not is_last:
            forward(model, filled, cache, plan, last_only=True)
            continue
        logits = forward(model, filled, cache, plan)[:, :piece.shape[1]]
        parts.append(logits[:, -1:] if last_only else logits)
    return torch.cat(parts, dim=1)


def is_steady(model: ModelAdapter) -> bool:
    """Whether a row has the same bits in any pass, whoever else is in it."""
    return bool(getattr(model, "steady", False))


def padded(planner: Planner, start: int, context: int | None) -> PassPlan:
    """A chain of ROWS tokens that attends to whole blocks of keys, those behind each token hidden from it."""
    plan = planner.chain(start, ROWS)
    keys = -(-plan.keys // KEY_BLOCK) * KEY_BLOCK
    visible = (planner.slots[:, :keys] <= plan.slots[0, :, None])[None, None]
    if context is None or plan.keys <= context:
        return PassPlan(plan.positions, plan.slots, keys, visible, start, chain=True)
    return PassPlan(plan.positions.clamp(max=context - 1), plan.slots, keys, visible, start)  # the last rows only fill up
