"""Mistakes of decoders that decode several requests side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.decoding import Batch, Request, Row, batch, rooms
from skipsearch.decoding.prefix import Prefix
from skipsearch.decoding.rooms import Rooms
from skipsearch.drafters.choosing import ChoosingSession
from skipsearch.drafters.lookup import LookupDrafter
from skipsearch.engine import RowCache, SharedCache, Wanted, joined
from skipsearch.mask import SkipMask
from skipsearch.models import masks
from skipsearch.modules.kangaroo import Shallow

from ..batch_checks import (
    check_batch,
    check_batch_of_clasps,
    check_batch_of_kangaroos,
    check_batch_of_lookups,
    check_batch_of_trees,
    check_batch_of_windows,
    check_batch_that_grows,
    check_owners,
    check_passes_of_a_batch,
)
from .register import caught_by


@caught_by(check_batch)
def row_sees_the_first_rows_kv() -> Iterator[None]:
    real = KVCache.write

    def write(self: KVCache, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        keys, values = real(self, layer, key, value, plan)
        return keys[:1].expand_as(keys), values[:1].expand_as(values)

    with patch.object(KVCache, "write", write):
        yield


@caught_by(check_batch)
def two_requests_in_one_row() -> Iterator[None]:
    real = RowCache.__init__

    def init(self: RowCache, shared: SharedCache, row: int, join: Any) -> None:
        real(self, shared, min(row, 1), join)

    with patch.object(RowCache, "__init__", init):
        yield


@caught_by(check_batch)
def seed_of_the_request_before() -> Iterator[None]:
    seeds = [0]
    real = Batch.join

    def join(self: Batch, request: Request, **named: Any) -> Row:
        seeds.append(request.seed)
        return real(self, replace(request, seed=seeds[-2]), **named)

    with patch.object(Batch, "join", join):
        yield


@caught_by(check_batch)
def one_length_for_all_rows() -> Iterator[None]:
    """Where one row accepts more, all lengths move."""
    def moved(self: RowCache, length: int) -> None:
        self.shared.length = length

    with patch.object(RowCache, "length", property(lambda self: self.shared.length, moved), create=True):
        yield


@caught_by(check_batch)
def longest_row_shown_to_all() -> Iterator[None]:
    """Every row sees as many keys as the longest: zeros, or what an earlier request left."""
    real = joined.joined_plan

    def plan(plans: Sequence[PassPlan | None], spare: int, device: torch.device) -> PassPlan:
        made = real(plans, spare, device)
        assert made.visible is not None
        return replace(made, visible=made.visible | (made.visible.any(dim=0, keepdim=True) & (made.slots != spare)[:, None, :, None]))

    with patch.object(joined, "joined_plan", plan):
        yield


@caught_by(check_batch)
def all_rows_stand_where_the_first_does() -> Iterator[None]:
    real = joined.joined_plan

    def plan(*arguments: Any) -> PassPlan:
        made = real(*arguments)
        return replace(made, positions=made.positions[:1].expand_as(made.positions))

    with patch.object(joined, "joined_plan", plan):
        yield


@caught_by(check_batch)
def padding_written_into_the_text() -> Iterator[None]:
    real = joined.joined_plan
    with patch.object(joined, "joined_plan", lambda plans, spare, device: real(plans, 0, device)):
        yield


@caught_by(check_batch_of_trees)
def trees_of_a_batch_seen_as_chains() -> Iterator[None]:
    real = joined.joined_plan

    def plan(plans: Sequence[PassPlan | None], spare: int, device: torch.device) -> PassPlan:
        return real([plan and replace(plan, chain=True) for plan in plans], spare, device)

    with patch.object(joined, "joined_plan", plan):
        yield


@caught_by(check_batch)
def answers_handed_out_in_another_order() -> Iterator[None]:
    """Logits go to the rows in the order in which they asked, and not by their place in the pass."""
    real = joined.together

    def together(wanted: Sequence[Wanted]) -> list[Any]:
        return real(sorted(wanted, key=lambda w: w.cache.first))

    with patch.object(batch, "together", together):
        yield


@caught_by(check_batch)
def scores_of_all_asked_for_by_one() -> Iterator[None]:
    """A greedy row that drafts beside a sampled one gets its draft from the sampled one's distribution."""
    with patch.object(Wanted, "kind", property(lambda self: (id(self.model), self.mask, self.scorer is None, self.confidence))):
        yield


@caught_by(check_batch)
def row_moved_without_its_kv() -> Iterator[None]:
    def move(self: SharedCache, row: RowCache, to: int) -> None:
        del self._parts[row.first, row.last]
        row.first, row.last = to, to + 1
        self.enter(row)

    with patch.object(SharedCache, "move", move):
        yield


@caught_by(check_batch_that_grows)
def row_cache_grown_without_what_was_there() -> Iterator[None]:
    def grow(self: SharedCache, capacity: int) -> None:
        if capacity > self.spare:
            self.capacity = capacity + 1
            for buffers in (self.keys, self.values):
                buffers[:] = [None if old is None else old.new_zeros(*old.shape[:2], self.capacity, old.shape[3]) for old in buffers]
            self._renew()

    with patch.object(SharedCache, "grow", grow):
        yield


@caught_by(check_batch)
def view_of_the_cache_that_was() -> Iterator[None]:
    """A row that was moved still reads and writes where it stood."""
    real = SharedCache.move

    def move(self: SharedCache, row: RowCache, to: int) -> None:
        keys, values = row.keys, row.values
        real(self, row, to)
        row.keys, row.values = keys, values

    with patch.object(SharedCache, "move", move):
        yield


@caught_by(check_passes_of_a_batch)
def row_that_has_ended_still_drafts() -> Iterator[None]:
    """Its last pass is run again beside those of the others."""
    last: dict[Row, Wanted] = {}
    real = batch._next_pass

    def next_pass(waiting: list[tuple[Row, Wanted]]) -> list[tuple[Row, Any]]:
        last.update(waiting)
        taken = {wanted.cache.first for _, wanted in waiting}
        waiting += [(row, wanted) for row, wanted in last.items() if row.ended and waiting and wanted.cache.first not in taken]
        return [(row, answer) for row, answer in real(waiting) if not row.ended]

    with patch.object(batch, "_next_pass", next_pass):
        yield


@caught_by(check_batch)
def dropped_row_goes_on() -> Iterator[None]:
    with patch.object(Row, "close", lambda self: None), patch.object(Batch, "drop", lambda self, row: None):
        yield


@caught_by(check_batch)
def stale_tail_of_a_rows_prefix() -> Iterator[None]:
    """What an earlier request left is copied into a row as if all of it were the prompt's."""
    with patch.object(Prefix, "shared", lambda self, prompt: min(len(self.tokens), len(prompt) - 1)):
        yield


@caught_by(check_batch_of_lookups)
def lookups_of_one_row_answered_by_another() -> Iterator[None]:
    """The index over a request's own text is that of the request that joined last."""
    real = LookupDrafter.begin
    kept: list[Any] = []

    def begin(self: LookupDrafter, ctx: Any) -> Any:
        session = real(self, ctx)
        kept.append(session.index)
        session.index = kept[0]
        return session

    with patch.object(LookupDrafter, "begin", begin):
        yield


@caught_by(check_batch_of_windows)
def window_of_the_first_row_for_all() -> Iterator[None]:
    """How far back a row sees is counted from where another one stands."""
    real = masks.windowed

    def windowed(plan: PassPlan, window: int | None) -> Tensor | None:
        return real(replace(plan, positions=plan.positions[:1].expand_as(plan.positions)), window)

    with patch.object(masks, "windowed", windowed):
        yield


@caught_by(check_batch_of_windows)
def window_left_out_of_joined_passes() -> Iterator[None]:
    real = masks.windowed
    with patch.object(masks, "windowed", lambda plan, window: real(plan, None if len(plan.positions) > 1 else window)):
        yield


@caught_by(check_batch_of_kangaroos)
def adapters_kv_of_another_row() -> Iterator[None]:
    """One cache for the adapter, whoever drafts."""
    caches: dict[int, KVCache] = {}
    real = Shallow.new_cache

    def new_cache(self: Shallow, capacity: int) -> KVCache:
        return caches.setdefault(capacity, real(self, capacity))

    with patch.object(Shallow, "new_cache", new_cache):
        yield


@caught_by(check_batch_of_clasps)
def one_mask_for_all_rows() -> Iterator[None]:
    """The mask that any request chose last is in force in all."""
    latest = [SkipMask(1)]
    chosen, real = ChoosingSession._adopt, ChoosingSession.draft

    def adopt(self: ChoosingSession, mask: SkipMask) -> None:
        chosen(self, mask)
        latest[0] = mask

    def draft(self: ChoosingSession, ctx: Any, most: int) -> Any:
        self._skip.skipped = latest[0]
        return real(self, ctx, most)

    with patch.object(ChoosingSession, "_adopt", adopt), patch.object(ChoosingSession, "draft", draft):
        yield


@caught_by(check_owners)
def prompt_shared_with_everybody() -> Iterator[None]:
    """Who sends what another one is just asking gets its first token sooner, and knows."""
    real = Rooms.begin
    with patch.object(Rooms, "begin", lambda self, cache, prompt, owner: real(self, cache, prompt, "all")):
        yield


@caught_by(check_owners)
def prompt_of_another_taken_whole() -> Iterator[None]:
    """K/V of a row's prompt are taken without a look at where the two part."""
    with patch.object(rooms, "common", lambda one, other: min(len(one), len(other))):
        yield
