"""A cache for one-token passes of a recurrent model at many positions of one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skipsearch.models.generic.cache_view import clone_state, map_tensors
from skipsearch.models.generic.recurrent import StateAt
from skipsearch.models.kv_cache import KVCache, PassPlan


class RecurrentReplayCache(KVCache):
    """A read-only KV cache with one batch row for each position of a text.

    All rows share the text's K/V; the pass plan decides which slots a row attends to.
    text_cache: [1, …] K/V of the text. length: slots of the text. states_at: the states of the full
    model's recurrent layers before the token of each position.
    """

    def __init__(self, text_cache: KVCache, length: int, states_at: Sequence[StateAt]):
        super().__init__(len(text_cache.keys), len(states_at), length + 1)
        self.keys, self.values, self.length = text_cache.keys, text_cache.values, length
        self._states = [
            map_tensors(
                lambda *rows: torch.cat(rows),
                *(layer_states.states[i] for layer_states in states_at),
            )
            for i in range(len(text_cache.keys))
        ]

    def write(
        self, layer: int, key: Tensor, value: Tensor, plan: PassPlan
    ) -> tuple[Tensor, Tensor]:
        """Return the text's K/V followed by each row's own, [B, heads, length + 1, D]."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        all_keys, all_values = (
            torch.cat([text[:, :, : self.length].expand(len(new), -1, -1, -1), new], dim=2)
            for text, new in ((keys, key), (values, value))
        )
        return all_keys, all_values

    def get_state(self, plan: PassPlan, layer: int) -> Any:
        return clone_state(self._states[layer])
