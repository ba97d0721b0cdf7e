"""Draft rows of a whole text at once, exactly as decoding runs them, and what the full model would have said there.

The full model reads the text once; its K/V stay. The draft then starts from every `depth`-th position: a group of rows, the first of
which sees the full model's K/V of all text before it, the later ones also those that the draft wrote for the rows of their group.
That is what a round of decoding sees, so nothing has to be carried over from training to decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine import inference, onward
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter

HEAD_ROWS = {"cpu": 1024, "cuda": 4096}   # of logits at a time


@dataclass(frozen=True)
class Targets:
    """What the full model says at R positions of each text: its likeliest tokens [B, R, K] and their share of the probability that these
    tokens have together. tokens[..., 0] is its own choice."""

    tokens: Tensor
    shares: Tensor


@dataclass(frozen=True)
class Reading:
    """Texts that the full model has read. texts: [B, T]; cache: their K/V, and room for as many rows behind them; targets: at all T
    positions."""

    texts: Tensor
    cache: KVCache
    targets: Targets


@dataclass(frozen=True)
class Lesson:
    """Texts that the full model has read, ready for a draft pass. fed: [B, R] tokens of the rows; depth: rows of a group."""

    fed: Tensor
    cache: KVCache
    plan: PassPlan
    targets: Targets
    depth: int


@inference
def read(model: ModelAdapter, texts: Tensor, likeliest: int, layers: Collection[int] | None = None) -> Reading:
    """texts: [B, T]. layers: whose attention drafts run, so that no other K/V are kept; None keeps all."""
    batch, length = texts.shape
    cache = model.new_cache(batch, 2 * length)
    plan = Planner(length, model.spec.device).chain(0, length, batch)
    states = onward(model, model.embed(texts, plan.positions), cache, plan)
    if layers is not None:
        cache = _of(cache, lambda i, buffer: buffer if i in layers else None)
    return Reading(texts, cache, targets(model, states, likeliest))


@inference
def lesson(reading: Reading, depth: int, first: int) -> Lesson:
    """first: where the first group starts, 0 … ; all positions behind it are fed, as far as whole groups go.

    Lessons of one reading take turns: a draft pass writes its rows where the last one's were.
    """
    texts, taught = reading.texts, reading.targets
    batch, length = texts.shape
    rows = (length - first) // depth * depth
    planner = Planner(length + rows, texts.device)
    positions = torch.arange(first, first + rows, device=texts.device)
    group = torch.arange(rows, device=texts.device) // depth
    anchors = first + group * depth
    anchored = planner.anchored(length, positions.expand(batch, rows).contiguous(), anchors.expand(batch, rows), group)
    cache = _of(reading.cache, lambda i, buffer: buffer.detach())   # without what autograd noted of an earlier lesson's rows
    some = slice(first, first + rows)
    return Lesson(texts[:, some], cache, anchored, Targets(taught.tokens[:, some], taught.shares[:, some]), depth)


def _of(cache: KVCache, choose: Callable[[int, Tensor], Tensor | None]) -> KVCache:
    """The same cache with another choice of its buffers. choose: given a layer and one of its buffers."""
    found = copy(cache)
    found.keys, found.values = ([None if buffer is None else choose(i, buffer) for i, buffer in enumerate(buffers)]
                                for buffers in (cache.keys, cache.values))
    return found


def draft_states(model: ModelAdapter, mask: SkipMask, given: Lesson) -> Tensor:
    """What goes into the draft's head at every row, [B, R, H]."""
    return onward(model, model.embed(given.fed, given.plan.positions), given.cache, given.plan, mask)


def targets(model: ModelAdapter, states: Tensor, likeliest: int) -> Targets:
    """From what goes into the full model's head, [B, R, H]."""
    flat, tokens, shares = states.flatten(0, 1), [], []
    for some in flat.split(head_rows(model)):
        top = model.head(some[None])[0].float().topk(min(likeliest, model.spec.vocab), dim=-1)
        tokens.append(top.indices)
        shares.append(top.values.softmax(dim=-1))
    shape = (*states.shape[:2], -1)
    return Targets(torch.cat(tokens).view(shape), torch.cat(shares).view(shape))


def head_rows(model: ModelAdapter) -> int:
    return HEAD_ROWS.get(model.spec.device.type, HEAD_ROWS["cpu"])
