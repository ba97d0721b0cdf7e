"""A view of our KV cache for transformers' own forward, which writes by slot and follows a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache

from skipsearch.models.kv_cache import KVCache, PassPlan


class TransformersCacheView(Cache):
    """A view of our cache for one pass.

    plan: of the pass.
    cache: None for a pass in which no layer runs, so that nothing is written. states: states from
    which recurrent layers continue, as in transformers' caches. The pass changes them in place."""

    def __init__(self, plan: PassPlan, cache: KVCache | None, states: Sequence[Any] = ()):
        super().__init__(layers=list(states))
        self.plan, self.cache = plan, cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        return self.cache.write(layer_idx, key_states, value_states, self.plan)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the pass.

        For a forward that derives positions from this number, only chains are correct."""
        return (
            self.plan.n_keys - self.plan.positions.shape[1]
            if self.plan.first_slot is None
            else self.plan.first_slot
        )

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.plan.n_keys, 0


def map_tensors(change: Callable[..., Tensor], *states: Any) -> Any:
    """Return a copy of a layer's state with other tensors.

    change: of a tensor of the state. It gets the same tensor of each state if there are several,
    whose other values are those of the first.
    """
    copied = copy.copy(states[0])
    for name, value in vars(states[0]).items():
        values = [getattr(state, name) for state in states]
        if isinstance(value, Tensor):
            setattr(copied, name, change(*values))
        elif isinstance(value, dict):
            items = {
                key: change(*(other[key] for other in values)) if isinstance(item, Tensor) else item
                for key, item in value.items()
            }
            setattr(copied, name, items)
    return copied


def clone_state(state: Any) -> Any:
    """Return a copy of a layer's state that shares no tensor with it."""
    return map_tensors(Tensor.clone, state)


def state_nbytes(state: Any) -> int:
    """Return the bytes of the tensors of a layer's state."""
    sizes = list[int]()

    def add_size(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(add_size, state)
    return sum(sizes)
