"""Exact passes: their shape is always the same, so a row's bits do not depend on the other rows.

A matrix product over eight rows rounds differently from eight products over one row. In bfloat16
and float16, a verify pass therefore sometimes prefers another token than one-token decoding does,
in every published system. An exact pass of the full model, prefill included, has EXACT_ROWS rows
and a multiple of EXACT_KEY_BLOCK keys. The bits of a row then depend neither on its place in the
pass, nor on the other rows, nor on the length of the cached text. Greedy text is the same with any
profile and without one.

Kernels do not guarantee this, so `refuse_unless_exact` tests it on the machine that decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from skipsearch.engine.forward import LayerTap, forward, no_grad, run_layer_loop
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

TapFactory = Callable[[PassPlan, int], LayerTap | None]

# Rows of an exact pass. Kernels keep the bits of a row at 4, 8 and 16 rows, but not at 9.
EXACT_ROWS = 8
# An exact pass attends to a multiple of this many keys. torch's CPU kernel sums over 512 keys at
# once. On some CPUs it sums a shorter block in another order, so that bits would depend on the
# length of the text.
EXACT_KEY_BLOCK = 512


def forward_exact(
    model: ModelAdapter,
    tokens: Tensor,
    cache: KVCache,
    planner: Planner,
    start: int,
    last_only: bool = False,
    make_tap: TapFactory | None = None,
) -> Tensor:
    """Run the full model over tokens [1, T] after `start` committed ones.

    An engine whose passes are batch-invariant, such as native, runs all tokens in one pass.

    cache: needs slots for whole blocks of EXACT_KEY_BLOCK keys, and EXACT_ROWS − 1 more slots than
    tokens. These are for padding rows, which no other row sees.
    make_tap: is called for each pass with its plan and its number of rows without padding; returns
    the tap of the pass, or None.
    Returns: logits [1, T, V], or [1, 1, V] with last_only.
    """
    count, parts = tokens.shape[1], []
    if is_batch_invariant(model):
        plan = planner.plan_chain(start, count)
        return forward(
            model,
            tokens,
            cache,
            plan,
            last_only=last_only,
            tap=None if make_tap is None else make_tap(plan, count),
        )
    for offset in range(0, count, EXACT_ROWS):
        chunk = tokens[:, offset : offset + EXACT_ROWS]
        padded = torch.nn.functional.pad(chunk, (0, EXACT_ROWS - chunk.shape[1]))
        is_last = offset + EXACT_ROWS >= count
        plan = fixed_shape_plan(planner, start + offset, model.spec.context_length)
        if make_tap is not None and (tap := make_tap(plan, chunk.shape[1])) is not None:
            # A pass with a tap may round differently, so its logits are not used.
            run_layer_loop(model, padded, cache, plan, last_only=True, tap=tap)
        if last_only and not is_last:
            forward(model, padded, cache, plan, last_only=True)
            continue
        logits = forward(model, padded, cache, plan)[:, : chunk.shape[1]]
        parts.append(logits[:, -1:] if last_only else logits)
    return torch.cat(parts, dim=1)


def is_batch_invariant(model: ModelAdapter) -> bool:
    """Return whether the bits of a row do not depend on the other rows of its pass."""
    return bool(getattr(model, "batch_invariant", False))


def refuse_unless_exact(model: ModelAdapter) -> None:
    """Check on this machine that a row has the same bits in every exact pass.

    The check runs a few passes, once for each model and number of threads. Raises: DecodeError if
    bits differ.
    """
    threads = torch.get_num_threads()
    if is_batch_invariant(model) or threads in _EXACT.get(model, ()):
        return
    expected, *others = _rows_in_other_passes(model)
    if any(not torch.equal(rows, expected) for rows in others):
        raise DecodeError(
            f"exact decoding is not possible for {model.spec.id} on the engine {model.spec.engine} "
            "in "
            f"{model.spec.dtype_name} here: the bits of a row depend on the other {EXACT_ROWS - 1} "
            "rows of its pass; leave exact "
            "out, or use the engine native, where they do not"
        )
    _EXACT.setdefault(model, set()).add(threads)


# Numbers of threads with which the check passed.
_EXACT: WeakKeyDictionary[ModelAdapter, set[int]] = WeakKeyDictionary()


@no_grad
def _rows_in_other_passes(model: ModelAdapter) -> list[Tensor]:
    """Return logits [T, V] of the same tokens for several splits of them into passes.

    From split to split, the place of a row in its pass changes, the other rows change, and some
    rows attend to one more block of keys. The context is a cache of zeros.
    """
    spec, count = model.spec, EXACT_ROWS + EXACT_ROWS // 2
    n_before = EXACT_KEY_BLOCK - count
    if spec.context_length is not None and n_before + count > spec.context_length:
        n_before, count = 0, min(count, spec.context_length)
    tokens = torch.randint(
        0, spec.vocab_size, (1, count), generator=torch.Generator().manual_seed(0)
    ).to(spec.device)
    logits_by_split = []
    for first_size in (count, 1, 5):  # of the first pass
        cache = model.new_cache(1, 2 * EXACT_KEY_BLOCK)
        planner = Planner(2 * EXACT_KEY_BLOCK, spec.device)
        token_ranges = (
            [(0, first_size), (first_size, count)] if first_size < count else [(0, count)]
        )
        parts = [
            forward_exact(model, tokens[:, a:b], cache, planner, n_before + a)[0]
            for a, b in token_ranges
        ]
        # NaN differs from itself; decoding refuses it anyway.
        logits_by_split.append(torch.cat(parts).nan_to_num())
    return logits_by_split


def fixed_shape_plan(planner: Planner, start: int, context_length: int | None) -> PassPlan:
    """Return the plan of a chain of EXACT_ROWS tokens that attends to whole blocks of keys."""
    plan = planner.plan_chain(start, EXACT_ROWS)
    keys = -(-plan.n_keys // EXACT_KEY_BLOCK) * EXACT_KEY_BLOCK
    visible = (planner.list_slots(keys) <= plan.slots[0, :, None])[None, None]
    if context_length is None or plan.n_keys <= context_length:
        return PassPlan(plan.positions, plan.slots, keys, visible, start, is_chain=True)
    # Rows after the end of the context are padding.
    positions = plan.positions.clamp(max=context_length - 1)
    return PassPlan(positions, plan.slots, keys, visible, start)
