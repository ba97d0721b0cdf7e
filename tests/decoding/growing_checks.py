"""Checks of caches that grow with their text.

The tokens must be those of a cache that has all slots from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from helpers.tiny import FullModel, tiny_model_and_reference

from skipsearch.core.stats import DecodeStats
from skipsearch.engine import RowCache
from skipsearch.models import ModelAdapter
from skipsearch.models.kv_cache import KVCache

from .batch_checks import GUESTS, check_batch
from .checks import DRAFTINGS, PROMPTS, assert_partly_accepted, check_greedy, padded_passes
from .prefix_checks import check_prefixes
from .recurrent_checks import CHAINS, recurrent_world


@contextmanager
def small_caches(slots: int = 4) -> Iterator[list[int]]:
    """Plant no bug, but caches with few slots, which grow every few tokens.

    Yields the sizes of grown caches so far.
    """
    grown: list[int] = []
    real = KVCache._set_capacity

    def set_capacity(self: KVCache, capacity: int) -> None:
        if capacity > self.capacity:
            grown.append(capacity)
        real(self, capacity)

    with (
        patch("skipsearch.models.kv_cache.MIN_SLOTS", slots),
        patch("skipsearch.decoding.prefix_cache.FIRST_TOKENS", 0),
        patch("skipsearch.decoding.loop.WHOLE_SLOTS", 0),
        patch.object(KVCache, "_set_capacity", set_capacity),
    ):
        yield grown


def check_growing_caches(
    check: Callable[[], DecodeStats] | None = None,
    world: tuple[ModelAdapter, FullModel] | None = None,
) -> None:
    """Check drafts, trees and verify passes that end at the limit of a cache or cross it."""
    shared = world or tiny_model_and_reference()  # loaded as ever
    with small_caches() as grown:
        stats = check() if check else check_greedy(DRAFTINGS[:1] + DRAFTINGS[6:7], world=shared)
    assert_partly_accepted(stats)
    assert len(set(grown)) >= 3, grown


def check_growing_padded_passes() -> None:
    """Check passes over slots that no pass has written, in enlarged buffers."""
    world = tiny_model_and_reference()
    with padded_passes(), small_caches() as grown:
        assert_partly_accepted(check_greedy(DRAFTINGS[:1], [(PROMPTS[2], 80)], world))
    assert {64, 128} <= set(grown), grown


def check_growing_sessions() -> None:
    """Check that the cache of a session shrinks to its text and grows again."""
    check_growing_caches(check_prefixes)


def check_growing_batches() -> None:
    """Check that all rows grow with the longest while each is in the middle of a round."""
    check_growing_caches(check_batch)


def check_leaving_rows() -> None:
    """Check rows that outgrow their part of the shared cache and leave it.

    The other rows continue to share passes.
    """
    left: list[int] = []
    real = RowCache._leave

    def leave(self: RowCache, slots: int) -> None:
        left.append(slots)
        real(self, slots)

    world = tiny_model_and_reference()
    with small_caches(), patch.object(RowCache, "_leave", leave):
        total = check_batch(world=world, max_slots=4 * 16)
    assert_partly_accepted(total)
    assert len(left) > 2, left
    assert min(left) > 16
    assert any(len(guest.request.input_ids) > 16 for guest in GUESTS), (
        "some begin with a cache of their own"
    )


def check_growing_recurrent_caches() -> None:
    world = recurrent_world("lfm2")
    with small_caches():
        assert_partly_accepted(check_greedy((CHAINS[0], CHAINS[-1]), world=world))
        assert check_prefixes(drafting=CHAINS[0], world=world).cached_tokens > 0
