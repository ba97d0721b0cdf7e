"""The KV cache, which is written by slot, and the plan of a pass: its slots and its mask.

Rollback only changes an integer. Rejected K/V stay in their slots. Plans hide them, and the next
verify pass overwrites them before they are read. Buffers start as zeros, because a masked NaN is
still a NaN (0 · NaN).

A cache grows with its text. Its capacity doubles if a pass needs more slots. In total, growing
therefore copies fewer than two slots per token, and a cache has at most twice the slots that its
longest pass needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from skipsearch.errors import DecodeError

MIN_SLOTS = 256  # the smallest capacity that a cache grows to


@dataclass(frozen=True)
class PassPlan:
    """The positions, slots and visible keys of the T tokens of one forward pass."""

    positions: Tensor  # [B, T] int64, for the rotary embedding; siblings of a tree share one
    slots: Tensor  # [B, T] int64, where in the cache the K/V of each token are written
    n_keys: int  # attention reads the slots 0 … n_keys − 1
    # [B or 1, 1, T, n_keys] bool, True: visible. None: plain causal attention, which is either one
    # token that attends to every key, or a prefill from slot 0 (a pattern of the kernel).
    mask: Tensor | None
    # The slots of every text are the slice first_slot … first_slot + T − 1; None: any slots.
    first_slot: int | None
    # Whether the position of each token is its slot, and it attends to every slot up to its own. If
    # so, `mask` need not be read.
    is_chain: bool = False
    # [B or 1, n_keys], the position of the token in each slot. None: slot i holds token i, for
    # every slot that this pass does not write.
    key_positions: Tensor | None = None

    def without_first(self, n_rows: int) -> PassPlan:
        """Return the plan without its first tokens, whose K/V are already written."""
        # A single remaining token of a chain attends to every key.
        is_single = self.is_chain and self.positions.shape[1] == n_rows + 1
        mask = None if is_single or self.mask is None else self.mask[:, :, n_rows:]
        return replace(
            self,
            positions=self.positions[:, n_rows:],
            slots=self.slots[:, n_rows:],
            mask=mask,
            first_slot=None if self.first_slot is None else self.first_slot + n_rows,
        )


def round_slots(slots: int) -> int:
    """Return the capacity of a cache for at least `slots`: a power of two.

    Engines that capture passes then have few shapes.
    """
    return max(MIN_SLOTS, 1 << (slots - 1).bit_length())


def resize(buffer: Tensor, slots: int) -> Tensor:
    """Copy a buffer [B, heads, S, D] to a new buffer with `slots` slots; new slots are zero."""
    resized = buffer.new_empty(*buffer.shape[:2], slots, buffer.shape[3])
    count = min(slots, buffer.shape[2])
    resized[:, :, :count] = buffer[:, :, :count]
    resized[:, :, count:] = 0
    return resized


class CompanionCache(Protocol):
    """What another model keeps of the same text."""

    @property
    def nbytes(self) -> int: ...

    def reset(self) -> None:
        """Forget all tokens. Buffers may stay allocated."""

    def shrink(self, slots: int) -> None:
        """Free the memory of slots beyond the capacity of a cache for `slots`."""


class KVCache:
    """Keys and values of every layer, [B, heads, slots, head_dim] each.

    A layer's buffers are allocated, or grow, if a pass runs the layer. Layers grow one by one, so
    that at most one layer is in memory twice. If memory runs out, the layer does not change."""

    # Whether the addresses of buffers are fixed as long as `generation` does not change.
    stable_buffers: ClassVar[bool] = True

    def __init__(self, n_layers: int, batch_size: int, capacity: int):
        self.batch_size = batch_size
        self.capacity = capacity  # slots of a layer after a pass has run it
        self.generation = 0  # counts the changes of `capacity`
        self.length = 0  # slots with committed K/V of the full model; a rollback does not change it
        self.keys: list[Tensor | None] = [None] * n_layers
        self.values: list[Tensor | None] = [None] * n_layers
        # By their owner, such as a drafter. They are reused and reset with this cache.
        self.companions: dict[object, CompanionCache] = {}

    def reserve(self, slots: int) -> None:
        """Grow the cache to at least `slots` slots."""
        if slots > self.capacity:
            self._set_capacity(round_slots(slots))

    def shrink(self, slots: int) -> None:
        """Free the memory of slots beyond the capacity of a cache for `slots`."""
        for companion in self.companions.values():
            companion.shrink(slots)
        if self.capacity > round_slots(slots):
            self._set_capacity(round_slots(slots))
            for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
                if keys is not None and values is not None and keys.shape[2] > self.capacity:
                    self.keys[layer], self.values[layer] = (
                        resize(keys, self.capacity),
                        resize(values, self.capacity),
                    )

    def _set_capacity(self, capacity: int) -> None:
        self.capacity, self.generation = capacity, self.generation + 1

    def write(
        self, layer: int, key: Tensor, value: Tensor, plan: PassPlan
    ) -> tuple[Tensor, Tensor]:
        """Store K/V [B, heads, T, D] of a pass; return all visible K/V, [B, heads, n_keys, D]."""
        self.reserve(plan.n_keys)
        keys, values = self.get_buffers(layer, key, value)
        if plan.first_slot is not None:
            end = plan.first_slot + key.shape[2]
            keys[:, :, plan.first_slot : end] = key
            values[:, :, plan.first_slot : end] = value
        else:
            index = plan.slots[:, None, :, None].to(key.device)
            keys.scatter_(2, index.expand_as(key), key)
            values.scatter_(2, index.expand_as(value), value)
        return keys[:, :, : plan.n_keys], values[:, :, : plan.n_keys]

    def get_buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers, allocated or grown for K/V of this shape."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (self.batch_size, key.shape[1], self.capacity)
            keys = torch.zeros(*shape, key.shape[-1], dtype=key.dtype, device=key.device)
            values = torch.zeros(*shape, value.shape[-1], dtype=value.dtype, device=value.device)
        elif keys.shape[2] < self.capacity:
            keys, values = resize(keys, self.capacity), resize(values, self.capacity)
        else:
            return keys, values
        self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def compact(self, slots: Sequence[int], first_slot: int) -> None:
        """Copy the K/V of `slots`, in this order, to the slots from `first_slot` on, in all layers.

        Keys contain the rotary angle of their position, so the new slot of a token must equal its
        position.
        """
        if all(slot == first_slot + i for i, slot in enumerate(slots)):
            return
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                rows = buffer[:, :, list(slots)]  # a copy, so that ranges may overlap
                buffer[:, :, first_slot : first_slot + len(slots)] = rows

    def resumable_length(self, n_tokens: int) -> int:
        """Return the last position, at most `n_tokens`, at which a pass can resume."""
        return n_tokens

    def copy_from(self, other: KVCache, n_slots: int) -> None:
        """Copy the first `n_slots` slots of another cache of the same model."""
        self.reserve(n_slots)
        for layer, (key, value) in enumerate(zip(other.keys, other.values, strict=True)):
            if key is not None and value is not None:
                keys, values = self.get_buffers(layer, key, value)
                keys[:, :, :n_slots] = key[:, :, :n_slots]
                values[:, :, :n_slots] = value[:, :, :n_slots]

    def reset(self) -> None:
        """Remove all tokens. The buffers stay allocated for the next request."""
        self.length = 0
        for companion in self.companions.values():
            companion.reset()

    @property
    def nbytes(self) -> int:
        own = sum(t.numel() * t.element_size() for t in (*self.keys, *self.values) if t is not None)
        return own + sum(companion.nbytes for companion in self.companions.values())


class Planner:
    """A builder of pass plans for one cache."""

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity  # the most slots of a pass; the cache may grow up to them
        self._slots = torch.arange(min(capacity, MIN_SLOTS), device=device)[None]

    def list_slots(self, count: int) -> Tensor:
        """Return the numbers of the first `count` slots, [1, count]. Plans are views of them."""
        if count > self._slots.shape[1]:
            self._slots = torch.arange(round_slots(count), device=self._slots.device)[None]
        return self._slots[:, :count]

    def plan_chain(self, first_slot: int, n_tokens: int, batch_size: int = 1) -> PassPlan:
        """Plan a pass over consecutive tokens, which are written from `first_slot` on.

        Each token attends to all earlier tokens and itself. Raises: DecodeError if the pass exceeds
        the capacity.
        """
        end = self._check_end(first_slot, n_tokens)
        keys = self.list_slots(end)
        slots = keys.narrow(1, first_slot, n_tokens)
        if batch_size > 1:
            slots = slots.expand(batch_size, n_tokens)
        is_plain = n_tokens == 1 or first_slot == 0
        mask = None if is_plain else (keys <= keys[0, first_slot:, None])[None, None]
        return PassPlan(slots, slots, end, mask, first_slot, is_chain=True)

    def plan_tree(self, first_slot: int, parents: Sequence[int]) -> PassPlan:
        """Plan a pass over a tree, with the root as node 0.

        Node i = 1, 2, … is a child of node parents[i − 1] < i. Node i is written to slot first_slot
        + i, and its position is first_slot + its depth. It attends to the slots before
        `first_slot`, its ancestors and itself.

        Raises: DecodeError if the pass exceeds the capacity."""
        end, device = self._check_end(first_slot, 1 + len(parents)), self._slots.device
        depths, sees = [0], [[True] + [False] * len(parents)]
        for node, parent in enumerate(parents, 1):
            depths.append(depths[parent] + 1)
            sees.append([*sees[parent][:node], True, *sees[parent][node + 1 :]])
        text_mask = torch.ones(len(sees), first_slot, dtype=torch.bool, device=device)
        mask = torch.cat([text_mask, torch.tensor(sees, device=device)], dim=1)
        positions = torch.tensor([depths], device=device) + first_slot
        slots = self.list_slots(end)[:, first_slot:]
        return PassPlan(positions, slots, end, mask[None, None], first_slot)

    def plan_replay(
        self, first_slot: int, positions: Tensor, anchors: Tensor, groups: Tensor
    ) -> PassPlan:
        """Plan a pass over R rows, each of which attends to the text only up to its anchor.

        Row r is written to slot first_slot + r, after the text. It attends to the slots before its
        anchor, the earlier rows of its group, and itself.

        positions: [B, R]. anchors: [B, R], the number of text slots that a row attends to. groups:
        [R].
        Raises: DecodeError if the pass exceeds the capacity."""
        batch_size, n_rows = positions.shape
        end = self._check_end(first_slot, n_rows)
        text = self.list_slots(end)[:, :first_slot]
        row = torch.arange(n_rows, device=self._slots.device)
        same_group = (groups == groups[:, None]) & (row <= row[:, None])  # [R, R]
        mask = torch.cat(
            [text < anchors[..., None], same_group.expand(batch_size, n_rows, n_rows)], dim=-1
        )[:, None]  # [B, 1, R, end]
        return PassPlan(
            positions,
            self.list_slots(end)[:, first_slot:].expand(batch_size, n_rows),
            end,
            mask,
            first_slot,
            key_positions=torch.cat([text.expand(batch_size, first_slot), positions], dim=1),
        )

    def _check_end(self, first_slot: int, n_tokens: int) -> int:
        end = first_slot + n_tokens
        if end > self.capacity:
            raise DecodeError(
                f"this pass needs {end} slots and the cache has {self.capacity}: ask for a larger "
                "capacity"
            )
        return end
