"""Run the draft steps of many rounds in one pass over a text, with the full model's targets.

The full model reads the text once, and its K/V stay in the cache. The draft then starts at every
`group_size`-th position. Each start has a group of rows, one row for each draft step. The first row
of a group attends to the full model's K/V of all earlier text. Later rows also attend to the
draft's K/V of their group. A round of decoding attends to the same K/V.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.engine import no_grad, run_layers
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

MAX_HEAD_ROWS = {"cpu": 1024, "cuda": 4096}  # rows of logits at a time


@dataclass(frozen=True)
class TeacherTargets:
    """The full model's predictions at R positions of each text."""

    tokens: Tensor  # [B, R, K]: its most likely tokens; tokens[..., 0] is its choice
    probs: Tensor  # [B, R, K]: their probabilities, scaled to sum 1


@dataclass(frozen=True)
class TeacherOutput:
    """Texts that the full model has read, with its K/V and predictions."""

    texts: Tensor  # [B, T]
    cache: KVCache  # their K/V, and T free slots after them
    targets: TeacherTargets  # at all T positions


@dataclass(frozen=True)
class DraftBatch:
    """The input and the targets of one draft pass."""

    input_ids: Tensor  # [B, R]
    cache: KVCache
    plan: PassPlan
    targets: TeacherTargets
    group_size: int  # rows of a group


@no_grad
def run_teacher(
    model: ModelAdapter, texts: Tensor, top_k: int, kv_layers: Collection[int] | None = None
) -> TeacherOutput:
    """Run the full model over texts [B, T].

    kv_layers: the layers whose attention the draft runs; only their K/V are kept. None: all K/V."""
    batch, length = texts.shape
    cache = model.new_cache(batch, 2 * length)
    plan = Planner(length, model.spec.device).plan_chain(0, length, batch)
    states = run_layers(model, model.embed(texts, plan.positions), cache, plan)
    if kv_layers is not None:
        cache = _select_buffers(cache, lambda i, buffer: buffer if i in kv_layers else None)
    return TeacherOutput(texts, cache, compute_teacher_targets(model, states, top_k))


@no_grad
def make_draft_batch(teacher_output: TeacherOutput, group_size: int, offset: int) -> DraftBatch:
    """Return the input and targets of one draft pass over the positions from `offset` on.

    The rows form groups of `group_size` rows, one row for each draft step of a round. Positions
    that do not fill a last group are left out.

    Two batches of one teacher output cannot be used at the same time, because their draft passes
    write to the same slots.
    """
    texts, targets = teacher_output.texts, teacher_output.targets
    batch, length = texts.shape
    rows = (length - offset) // group_size * group_size
    planner = Planner(length + rows, texts.device)
    positions = torch.arange(offset, offset + rows, device=texts.device)
    group = torch.arange(rows, device=texts.device) // group_size
    anchors = offset + group * group_size
    anchored = planner.plan_replay(
        length, positions.expand(batch, rows).contiguous(), anchors.expand(batch, rows), group
    )
    # Drop the autograd graph of an earlier batch.
    cache = _select_buffers(teacher_output.cache, lambda i, buffer: buffer.detach())
    window = slice(offset, offset + rows)
    return DraftBatch(
        texts[:, window],
        cache,
        anchored,
        TeacherTargets(targets.tokens[:, window], targets.probs[:, window]),
        group_size,
    )


def _select_buffers(cache: KVCache, choose: Callable[[int, Tensor], Tensor | None]) -> KVCache:
    """Return a copy of a cache in which some K/V buffers are replaced or dropped.

    choose(layer, buffer) returns the buffer of the copy; None drops it.
    """
    selected = copy(cache)
    selected.keys, selected.values = (
        [None if buffer is None else choose(i, buffer) for i, buffer in enumerate(buffers)]
        for buffers in (cache.keys, cache.values)
    )
    return selected


def run_draft_layers(model: ModelAdapter, mask: SkipMask, draft_batch: DraftBatch) -> Tensor:
    """Run the draft's layers; return the input of its head at every row, [B, R, H]."""
    return run_layers(
        model,
        model.embed(draft_batch.input_ids, draft_batch.plan.positions),
        draft_batch.cache,
        draft_batch.plan,
        mask,
    )


def compute_teacher_targets(
    model: ModelAdapter, hidden_states: Tensor, top_k: int
) -> TeacherTargets:
    """Return the targets at R positions. hidden_states: input of the model's head, [B, R, H]."""
    flat, tokens, shares = hidden_states.flatten(0, 1), [], []
    for part in flat.split(max_head_rows(model)):
        top = model.head(part[None])[0].float().topk(min(top_k, model.spec.vocab_size), dim=-1)
        tokens.append(top.indices)
        shares.append(top.values.softmax(dim=-1))
    shape = (*hidden_states.shape[:2], -1)
    return TeacherTargets(torch.cat(tokens).view(shape), torch.cat(shares).view(shape))


def count_agreeing(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: TeacherTargets, max_rows: int
) -> int:
    """Count the rows at which a draft's most likely token is the full model's.

    hidden: the input of the draft's head, [B, R, H]. max_rows: rows of logits at a time.
    """
    rows, tokens = hidden.flatten(0, 1), targets.tokens[..., 0].flatten()
    return sum(
        int((head(part[None])[0].argmax(dim=-1) == targets_part).sum())
        for part, targets_part in zip(rows.split(max_rows), tokens.split(max_rows), strict=True)
    )


def max_head_rows(model: ModelAdapter) -> int:
    """Return the most rows whose logits may be in memory at a time."""
    return MAX_HEAD_ROWS.get(model.spec.device.type, MAX_HEAD_ROWS["cpu"])
