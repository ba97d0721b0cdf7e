"""The one KV cache, written by slot, and the plans that say what a pass writes and sees."""

from __future__ import annotations

import pytest
import torch
from helpers.properties import with_examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skipsearch.errors import DecodeError
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

CPU = torch.device("cpu")


def entries(
    tokens: int, first: float = 1.0, batch: int = 1, heads: int = 2, dim: int = 3
) -> Tensor:
    """[batch, heads, tokens, dim], where token t holds first + t."""
    return (torch.arange(tokens) + first)[:, None].expand(batch, heads, tokens, dim).contiguous()


def column(t: Tensor) -> list[float]:
    return t[0, 0, :, 0].tolist()


def test_what_a_pass_writes_is_what_later_passes_see_up_to_their_own_end() -> None:
    cache, planner = KVCache(2, 1, 8), Planner(8, CPU)
    cache.write(0, entries(3, 1), entries(3, 11), planner.plan_chain(0, 3))
    keys, values = cache.write(0, entries(2, 4), entries(2, 14), planner.plan_chain(3, 2))
    assert column(keys) == [1, 2, 3, 4, 5]
    assert column(values) == [11, 12, 13, 14, 15]


def test_rejected_entries_are_out_of_sight_once_length_has_not_moved_and_are_overwritten() -> None:
    cache, planner = KVCache(1, 1, 8), Planner(8, CPU)
    cache.write(0, entries(2), entries(2), planner.plan_chain(0, 2))
    cache.length = 2
    cache.write(0, entries(3, 50), entries(3, 50), planner.plan_chain(cache.length, 3))
    keys, _ = cache.write(0, entries(1, 7), entries(1, 7), planner.plan_chain(cache.length, 1))
    assert column(keys) == [1, 2, 7]


def test_buffers_start_at_zero_so_that_a_hidden_slot_is_never_a_nan() -> None:
    cache, planner = KVCache(3, 1, 64), Planner(64, CPU)
    cache.write(1, entries(2), entries(2), planner.plan_chain(5, 2))
    for buffer in (cache.keys[1], cache.values[1]):
        assert buffer is not None
        assert column(buffer)[:5] == [0] * 5
        assert not bool(buffer[:, :, 7:].any())
    assert cache.keys[0] is None, "a layer that never ran takes no memory"
    assert cache.nbytes == 2 * 2 * 64 * 3 * 4


def test_entries_may_go_to_any_slots_row_by_row() -> None:
    cache = KVCache(1, 2, 6)
    slots = torch.tensor([[4, 1], [0, 5]])
    plan = PassPlan(slots, slots, 6, None, None)
    keys, _ = cache.write(0, entries(2, batch=2), entries(2, batch=2), plan)
    assert keys[:, 0, :, 0].tolist() == [[0, 2, 0, 0, 1, 0], [1, 0, 0, 0, 0, 2]]


def test_keys_and_values_may_differ_in_width_and_keep_their_types() -> None:
    cache, planner = KVCache(1, 1, 4), Planner(4, CPU)
    keys, values = cache.write(
        0, entries(2, dim=3).double(), entries(2, dim=5).half(), planner.plan_chain(0, 2)
    )
    assert (keys.shape[-1], values.shape[-1], keys.dtype, values.dtype) == (
        3,
        5,
        torch.float64,
        torch.float16,
    )


def test_a_reset_cache_keeps_its_buffers_and_forgets_its_length() -> None:
    cache, planner = KVCache(1, 1, 4), Planner(4, CPU)
    cache.write(0, entries(2), entries(2), planner.plan_chain(0, 2))
    cache.length = 2
    buffer = cache.keys[0]
    cache.reset()
    assert cache.length == 0
    assert cache.keys[0] is buffer


@with_examples(80)
@given(st.integers(0, 20), st.integers(1, 12), st.integers(1, 3))
def test_a_chain_sees_everything_before_it_itself_and_nothing_after(
    start: int, tokens: int, batch: int
) -> None:
    plan = Planner(40, CPU).plan_chain(start, tokens, batch)
    assert (
        plan.positions.tolist()
        == plan.slots.tolist()
        == [list(range(start, start + tokens))] * batch
    )
    assert (plan.first_slot, plan.n_keys) == (start, start + tokens)
    if plan.mask is None:  # one token that sees every key, or a causal triangle from slot 0
        assert tokens == 1 or start == 0
    else:
        assert plan.mask.shape == (1, 1, tokens, plan.n_keys)
        assert plan.mask[0, 0].tolist() == [
            [key <= start + row for key in range(plan.n_keys)] for row in range(tokens)
        ]


def test_a_pass_beyond_the_end_is_refused_with_both_numbers() -> None:
    planner = Planner(8, CPU)
    assert planner.plan_chain(6, 2).n_keys == 8
    with pytest.raises(DecodeError, match="needs 9 slots and the cache has 8"):
        planner.plan_chain(6, 3)
