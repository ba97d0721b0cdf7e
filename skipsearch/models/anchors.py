"""Many places of one text side by side, each with the states that recurrent layers had there: a batch of passes of one token each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.models.recurrent import Standing, States
from skipsearch.models.view import cloned


class AnchoredCache(KVCache):
    """A row for each place. Rows share the K/V of the text, and a pass writes nothing that another one would see.

    text: [1, …] K/V of the whole text; length: slots of it that are looked at. standings: what the full model's layers kept before the
    token of each place.
    """

    def __init__(self, text: KVCache, length: int, standings: Sequence[Standing]):
        super().__init__(len(text.keys), len(standings), length + 1)
        self.keys, self.values, self.length = text.keys, text.values, length
        self._states = [_side_by_side([standing.states[i] for standing in standings]) for i in range(len(text.keys))]

    def write(self, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        """The text's K/V with each row's own behind them, [B, heads, length + 1, D]."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        whole = ((known[:, :, :self.length].expand(len(own), -1, -1, -1), own) for known, own in ((keys, key), (values, value)))
        with_own_key, with_own_value = (torch.cat(parts, dim=2) for parts in whole)
        return with_own_key, with_own_value

    def state(self, plan: PassPlan, layer: int) -> Any:
        return cloned(self._states[layer])


def _side_by_side(states: States) -> Any:
    """One state of B rows, of B states of one row."""
    found = copy.copy(states[0])
    for name, value in vars(states[0]).items():
        if isinstance(value, Tensor):
            setattr(found, name, torch.cat([getattr(state, name) for state in states]))
        elif isinstance(value, dict):
            setattr(found, name, {key: torch.cat([getattr(state, name)[key] for state in states]) if isinstance(one, Tensor) else one
                                  for key, one in value.items()})
    return found
