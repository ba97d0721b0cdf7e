"""Bugs of decoders that decode several requests at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Batch, Request, RunningRequest, batch, batch_cache
from skipsearch.decoding.batch_cache import BatchCache
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.drafters.dynamic_mask import DynamicMaskSession
from skipsearch.drafters.kangaroo.weights import EarlyExitDraft
from skipsearch.drafters.lookup.session import LookupSession
from skipsearch.engine import PassRequest, RowCache, SharedCache, batched_pass
from skipsearch.models import attention_masks
from skipsearch.models.kv_cache import KVCache, PassPlan, round_slots

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
from .register import caught_by, planted


@planted(check_batch, KVCache, "write")
def row_sees_the_first_rows_kv(real, self, layer, key, value, plan):
    keys, values = real(self, layer, key, value, plan)
    return keys[:1].expand_as(keys), values[:1].expand_as(values)


@planted(check_batch, RowCache, "__init__")
def two_requests_in_one_row(real, self, shared, row, join):
    real(self, shared, min(row, 1), join)


@caught_by(check_batch)
def seed_of_the_request_before() -> Iterator[None]:
    seeds = [0]
    real = Batch.join

    def join(self: Batch, request: Request, **named: Any) -> RunningRequest:
        seeds.append(request.seed)
        return real(self, replace(request, seed=seeds[-2]), **named)

    with patch.object(Batch, "join", join):
        yield


@caught_by(check_batch)
def one_length_for_all_rows() -> Iterator[None]:
    """If one row accepts more tokens, the lengths of all rows change."""

    def moved(self: RowCache, length: int) -> None:
        self.shared_cache.length = length

    with patch.object(
        RowCache, "length", property(lambda self: self.shared.length, moved), create=True
    ):
        yield


@planted(check_batch, batched_pass, "batch_plans")
def longest_row_shown_to_all(real, plans, spare, device):
    """Every row sees as many keys as the longest: zeros, or K/V of an earlier request."""
    made = real(plans, spare, device)
    assert made.mask is not None
    return replace(
        made,
        mask=made.mask
        | (made.mask.any(dim=0, keepdim=True) & (made.slots != spare)[:, None, :, None]),
    )


@planted(check_batch, batched_pass, "batch_plans")
def all_rows_stand_where_the_first_does(real, *arguments):
    made = real(*arguments)
    return replace(made, positions=made.positions[:1].expand_as(made.positions))


@caught_by(check_batch)
def padding_written_into_the_text() -> Iterator[None]:
    real = batched_pass.batch_plans
    with patch.object(
        batched_pass, "batch_plans", lambda plans, spare, device: real(plans, 0, device)
    ):
        yield


@caught_by(check_batch_of_trees)
def trees_of_a_batch_seen_as_chains() -> Iterator[None]:
    real = batched_pass.batch_plans

    def plan(plans: Sequence[PassPlan | None], spare: int, device: torch.device) -> PassPlan:
        return real([plan and replace(plan, is_chain=True) for plan in plans], spare, device)

    with patch.object(batched_pass, "batch_plans", plan):
        yield


@caught_by(check_batch)
def answers_handed_out_in_another_order() -> Iterator[None]:
    """Rows get logits in the order of their requests, and not by their place in the pass."""
    real = batched_pass.run_batched

    def together(wanted: Sequence[PassRequest]) -> list[Any]:
        return real(sorted(wanted, key=lambda w: w.cache.first_row))

    with patch.object(batch, "run_batched", together):
        yield


@caught_by(check_batch)
def scores_of_all_asked_for_by_one() -> Iterator[None]:
    """A greedy row next to a sampled one drafts from the distribution of the sampled one."""
    with patch.object(
        PassRequest,
        "group_key",
        property(
            lambda self: (id(self.model), self.mask, self.scorer is None, self.with_confidence)
        ),
    ):
        yield


@planted(check_batch, SharedCache, "move_row")
def row_moved_without_its_kv(real, self, row, to):
    del self._views[row.first_row, row.end_row]
    row.first_row, row.end_row = to, to + 1
    self.register(row)


@planted(check_batch_that_grows, SharedCache, "reserve")
def row_cache_grown_without_what_was_there(real, self, slots):
    if slots > self.padding_slot:
        self._set_capacity(round_slots(slots) + 1)
        for buffers in (self.keys, self.values):
            buffers[:] = [
                None if old is None else old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
                for old in buffers
            ]
        self._refresh_views()


@planted(check_batch, SharedCache, "move_row")
def view_of_the_cache_that_was(real, self, row, to):
    """A row that was moved still reads and writes its old slots."""
    keys, values = row.keys, row.values
    real(self, row, to)
    row.keys, row.values = keys, values


@caught_by(check_passes_of_a_batch)
def row_that_has_ended_still_drafts() -> Iterator[None]:
    """The last pass of a row that has ended runs again with those of the others."""
    last: dict[RunningRequest, PassRequest] = {}
    real = batch._run_next_group

    def next_pass(
        waiting: list[tuple[RunningRequest, PassRequest]],
    ) -> list[tuple[RunningRequest, Any]]:
        last.update(waiting)
        taken = {wanted.cache.first_row for _, wanted in waiting}
        waiting += [
            (row, wanted)
            for row, wanted in last.items()
            if row.ended and waiting and wanted.cache.first_row not in taken
        ]
        return [(row, answer) for row, answer in real(waiting) if not row.ended]

    with patch.object(batch, "_run_next_group", next_pass):
        yield


@caught_by(check_batch)
def dropped_row_goes_on() -> Iterator[None]:
    with (
        patch.object(RunningRequest, "close", lambda self: None),
        patch.object(Batch, "drop", lambda self, row: None),
    ):
        yield


@caught_by(check_batch)
def stale_tail_of_a_rows_prefix() -> Iterator[None]:
    """All K/V that an earlier request left are copied into a row as if they were of its prompt."""
    with patch.object(
        PrefixCache, "count_shared", lambda self, prompt: min(len(self.tokens), len(prompt) - 1)
    ):
        yield


@caught_by(check_batch_of_lookups)
def lookups_of_one_row_answered_by_another() -> Iterator[None]:
    """The index over a request's text is that of the request that joined last."""
    real = LookupSession.begin
    indexes: list[Any] = []

    def begin(self: LookupSession, ctx: Any) -> None:
        real(self, ctx)
        indexes.append(self.index)
        self.index = indexes[0]

    with patch.object(LookupSession, "begin", begin):
        yield


@planted(check_batch_of_windows, attention_masks, "with_window")
def window_of_the_first_row_for_all(real, plan, window):
    """The window of a row is counted from the position of another one."""
    return real(replace(plan, positions=plan.positions[:1].expand_as(plan.positions)), window)


@caught_by(check_batch_of_windows)
def window_left_out_of_joined_passes() -> Iterator[None]:
    real = attention_masks.with_window
    with patch.object(
        attention_masks,
        "with_window",
        lambda plan, window: real(plan, None if len(plan.positions) > 1 else window),
    ):
        yield


@caught_by(check_batch_of_kangaroos)
def adapters_kv_of_another_row() -> Iterator[None]:
    """One cache of the adapter serves all requests."""
    caches: dict[int, KVCache] = {}
    real = EarlyExitDraft.new_cache

    def new_cache(self: EarlyExitDraft, capacity: int) -> KVCache:
        return caches.setdefault(capacity, real(self, capacity))

    with patch.object(EarlyExitDraft, "new_cache", new_cache):
        yield


@caught_by(check_batch_of_clasps)
def one_mask_for_all_rows() -> Iterator[None]:
    """The mask that any request chose last is used by all."""
    latest = [SkipMask(1)]
    chosen, real = DynamicMaskSession._set_mask, DynamicMaskSession.draft

    def adopt(self: DynamicMaskSession, mask: SkipMask) -> None:
        chosen(self, mask)
        latest[0] = mask

    def draft(self: DynamicMaskSession, ctx: Any, most: int) -> Any:
        self._skip_session.mask = latest[0]
        return real(self, ctx, most)

    with (
        patch.object(DynamicMaskSession, "_set_mask", adopt),
        patch.object(DynamicMaskSession, "draft", draft),
    ):
        yield


@caught_by(check_owners)
def prompt_shared_with_everybody() -> Iterator[None]:
    """A user who sends another user's prompt gets the first token sooner, and can notice it."""
    real = BatchCache.copy_shared_prefix
    with patch.object(
        BatchCache,
        "copy_shared_prefix",
        lambda self, cache, prompt, owner: real(self, cache, prompt, "all"),
    ):
        yield


@caught_by(check_owners)
def prompt_of_another_taken_whole() -> Iterator[None]:
    """K/V of a row's prompt are copied without a check where the two prompts differ."""
    with patch.object(
        batch_cache, "common_prefix_length", lambda one, other: min(len(one), len(other))
    ):
        yield
