"""The one KV cache, written by slot, and the pass plan that says what a pass writes and sees.

Rollback is moving an integer: rejected entries stay behind, no plan shows them, and the next verify pass overwrites them
before anything reads them. Buffers start at zero, because a masked NaN is still a NaN (0 · NaN).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from skipsearch.errors import DecodeError


@dataclass(frozen=True)
class PassPlan:
    """One forward pass: where its T tokens stand, where their K/V go, and which slots each of them sees.

    positions, slots: [B, T] int64. A position feeds the rotary embedding, a slot is a place in the cache: siblings of a tree
    share a position. start: the first slot, where the slots are `start … start + T − 1` in every row (a slice instead of a
    scatter); None otherwise. keys: slots 0 … keys − 1 take part in attention.
    visible: [B or 1, 1, T, keys] bool, True = may look. None = plain causal attention with nothing to mask out: one token
    that sees every key, or a prefill from slot 0.
    chain: the tokens follow one another, each at the position of its slot and seeing every slot up to its own; code that knows
    this need not read `visible`.
    key_positions: [B or 1, keys], where the token in each slot stands; None: slot i holds token i,
    in every slot that this pass does not write.
    """

    positions: Tensor
    slots: Tensor
    keys: int
    visible: Tensor | None
    start: int | None
    chain: bool = False
    key_positions: Tensor | None = None

    def behind(self, rows: int) -> PassPlan:
        """The same pass without its first rows, whose K/V were written before."""
        alone = self.chain and self.positions.shape[1] == rows + 1   # one token that sees every key
        visible = None if alone or self.visible is None else self.visible[:, :, rows:]
        return replace(self, positions=self.positions[:, rows:], slots=self.slots[:, rows:], visible=visible,
                       start=None if self.start is None else self.start + rows)


class KVCache:
    """Keys and values of every layer, [B, heads, capacity, head_dim] each, allocated at a layer's first write.

    length: slots that hold committed K/V of the full model. Whoever commits moves it; whoever rolls back does not.
    lasting: whether its buffers stay where they are for as long as it lives.
    """

    lasting: ClassVar[bool] = True

    def __init__(self, n_layers: int, batch: int, capacity: int):
        self.batch, self.capacity, self.length = batch, capacity, 0
        self.keys: list[Tensor | None] = [None] * n_layers
        self.values: list[Tensor | None] = [None] * n_layers

    def write(self, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        """Store K/V [B, heads, T, D] of a pass and return all K/V it may look at, [B, heads, plan.keys, D]."""
        keys, values = self.buffers(layer, key, value)
        if plan.start is not None:
            end = plan.start + key.shape[2]
            keys[:, :, plan.start:end] = key
            values[:, :, plan.start:end] = value
        else:
            index = plan.slots[:, None, :, None].to(key.device)
            keys.scatter_(2, index.expand_as(key), key)
            values.scatter_(2, index.expand_as(value), value)
        return keys[:, :, :plan.keys], values[:, :, :plan.keys]

    def buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's whole buffers, made now if they are not there yet, for K/V like these."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (self.batch, key.shape[1], self.capacity)
            keys = self.keys[layer] = torch.zeros(*shape, key.shape[-1], dtype=key.dtype, device=key.device)
            values = self.values[layer] = torch.zeros(*shape, value.shape[-1], dtype=value.dtype, device=value.device)
        return keys, values

    def gather(self, slots: Sequence[int], start: int) -> None:
        """Copy the K/V of these slots, in this order, to the slots from `start` on, in every layer that has any.

        Keys carry the rotary angle of their token's position, so they stay right where the new slot is that position.
        """
        if all(slot == start + i for i, slot in enumerate(slots)):
            return
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer[:, :, start:start + len(slots)] = buffer[:, :, list(slots)]   # the right side is a copy

    def usable(self, tokens: int) -> int:
        """How many of the first `tokens` slots a pass may go on from, where what stands in them is still wanted."""
        return tokens

    def take_over(self, other: KVCache, count: int) -> None:
        """Copy the first `count` slots of a cache of the same model."""
        for layer, (key, value) in enumerate(zip(other.keys, other.values, strict=True)):
            if key is not None and value is not None:
                keys, values = self.buffers(layer, key, value)
                keys[:, :, :count] = key[:, :, :count]
                values[:, :, :count] = value[:, :, :count]

    def reset(self) -> None:
        """Forget everything; the buffers are kept for the next request."""
        self.length = 0

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values) if t is not None)


class Planner:
    """Builds the plans of passes behind what is committed. capacity: slots of the cache."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        self.slots = torch.arange(capacity, device=device)[None]  # [1, capacity]; every plan is a view into it

    def chain(self, start: int, tokens: int, batch: int = 1) -> PassPlan:
        """A pass over `tokens` consecutive tokens that go to the slots from `start` on, each seeing everything before it.

        Raises: DecodeError if that passes the end of the cache.
        """
        end = self._end(start, tokens)
        slots = self.slots.narrow(1, start, tokens)
        if batch > 1:
            slots = slots.expand(batch, tokens)
        plain = tokens == 1 or start == 0
        visible = None if plain else (self.slots[:, :end] <= self.slots[0, start:end, None])[None, None]
        return PassPlan(slots, slots, end, visible, start, chain=True)

    def tree(self, start: int, parents: Sequence[int]) -> PassPlan:
        """A pass over a root and the nodes of a tree below it. Node i = 1, 2, … hangs below node parents[i − 1] < i; the root is node 0.

        Node i goes to slot start + i and stands at position start + its depth. It sees the slots before `start`, its ancestors and itself.
        Raises: DecodeError if that passes the end of the cache.
        """
        end, device = self._end(start, 1 + len(parents)), self.slots.device
        depths, sees = [0], [[True] + [False] * len(parents)]
        for node, parent in enumerate(parents, 1):
            depths.append(depths[parent] + 1)
            sees.append([*sees[parent][:node], True, *sees[parent][node + 1:]])
        among = torch.tensor(sees, device=device)
        visible = torch.cat([torch.ones(len(sees), start, dtype=torch.bool, device=device), among], dim=1)
        positions = torch.tensor([depths], device=device) + start
        return PassPlan(positions, self.slots[:, start:end], end, visible[None, None], start)

    def anchored(self, start: int, positions: Tensor, anchors: Tensor, groups: Tensor) -> PassPlan:
        """A pass over R rows that each look at a part of the text, as if it ended there.

        A row sees the slots before its anchor, the earlier rows of its group, and itself. Row r is written to slot start + r, behind the
        text. positions, anchors: [B, R], where each row stands and which slots it sees of the text; groups: [R], a number for each.
        Raises: DecodeError if that passes the end of the cache.
        """
        rows = positions.shape[1]
        end = self._end(start, rows)
        text, row = self.slots[:, :start], torch.arange(rows, device=self.slots.device)
        own = (groups == groups[:, None]) & (row <= row[:, None])                                                  # [R, R]
        visible = torch.cat([text < anchors[..., None], own.expand(len(positions), rows, rows)], dim=-1)[:, None]  # [B, 1, R, end]
        places = torch.cat([text.expand(len(positions), start), positions], dim=1)
        return PassPlan(positions, self.slots[:, start:end].expand(len(positions), rows), end, visible, start, key_positions=places)

    def _end(self, start: int, tokens: int) -> int:
        end = start + tokens
        if end > self.capacity:
            raise DecodeError(f"this pass needs {end} slots and the cache has {self.capacity}: ask for a larger capacity")
        return end
