"""Our KV cache as transformers' own forward takes one: it writes by slot, and tells the forward what the pass plan says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache

from skipsearch.cache import KVCache, PassPlan


class View(Cache):
    """One pass over our cache. cache: None for a pass whose layers do not run, so that nothing is written.

    states: what recurrent layers go on from, as transformers' own caches have it; the pass changes it in place.
    """

    def __init__(self, plan: PassPlan, cache: KVCache | None, states: Sequence[Any] = ()):
        super().__init__(layers=list(states))
        self.plan, self.cache = plan, cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        return self.cache.write(layer_idx, key_states, value_states, self.plan)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the pass. A forward that reads positions from here is right for chains alone."""
        return self.plan.keys - self.plan.positions.shape[1] if self.plan.start is None else self.plan.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.plan.keys, 0


def cloned(state: Any) -> Any:
    """A layer's state that shares no tensor with it."""
    found = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(found, name, value.clone())
        elif isinstance(value, dict):
            setattr(found, name, {key: one.clone() if isinstance(one, Tensor) else one for key, one in value.items()})
    return found


def tensors_of(state: Any) -> list[Tensor]:
    """What a layer's state consists of."""
    values = [*vars(state).values(), *(one for value in vars(state).values() if isinstance(value, dict) for one in value.values())]
    return [value for value in values if isinstance(value, Tensor)]
