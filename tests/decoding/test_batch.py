"""Batches: a row's tokens are those that it gets alone."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.marks import engine_params, thorough
from helpers.threads import one_thread
from helpers.tiny import tiny_llama, tiny_model_and_reference, use_engine

from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Batch, Decoder, Request
from skipsearch.decoding import batch as batch_module
from skipsearch.engine import PassRequest, RowCache, SharedCache, no_grad, run_batched
from skipsearch.engine.engines import wrap_engine
from skipsearch.engine.forward import run_pass
from skipsearch.errors import DecodeError, ModelError
from skipsearch.models import adapt
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import fuse_model
from skipsearch.models.kv_cache import Planner

from .batch_checks import (
    GUESTS,
    check_batch,
    check_batch_that_grows,
    check_owners,
    check_passes_of_a_batch,
    guests,
)
from .checks import DRAFTINGS, MASKS, PROMPTS, Drafting, assert_partly_accepted

__all__ = ["one_thread"]


def fuzz(seeds: range, longest: int = 24) -> DecodeStats:
    """Decode a batch of 1 to 8 rows for every seed, with one of the draftings.

    Some rows have an end-of-sequence token.
    """
    total, seen = DecodeStats(), Counter[str]()
    for seed in seeds:
        drafting = (None, *DRAFTINGS)[seed % (1 + len(DRAFTINGS))]
        total += check_batch(
            guests(seed, 10, longest),
            drafting,
            rows=1 + seed * 5 % 8,
            eos=(7, 41) if seed % 3 == 0 else (),
            seen=seen,
        )
    print(
        f"{len(seeds)} batches: {dict(seen)}, {total.drafted} drafted, {total.accepted} accepted, "
        f"{total.rejecting_rounds} rejections"
    )
    assert seen["joined later"]
    assert seen["left"]
    return total


def test_any_batch_gives_each_request_what_it_gets_alone() -> None:
    assert_partly_accepted(fuzz(range(8), longest=14))


@pytest.mark.slow
def test_a_thousand_batches_give_each_request_what_it_gets_alone() -> None:
    assert_partly_accepted(fuzz(range(1000)))


@pytest.mark.parametrize("engine", engine_params("native", thorough=("lean", "graph")))
def test_on_other_engines_too(engine: str) -> None:
    with use_engine(engine):
        world = tiny_model_and_reference()
    for drafting in (DRAFTINGS[0], DRAFTINGS[5], DRAFTINGS[6]):
        assert_partly_accepted(check_batch(drafting=drafting, world=world))


@pytest.mark.parametrize(
    "drafting",
    [*DRAFTINGS[2::4], *thorough(*DRAFTINGS[::4], *DRAFTINGS[1::2])],
    ids=lambda drafting: drafting.recipe.shape,
)
def test_requests_of_every_kind_of_drafting_join_and_leave(drafting: Drafting) -> None:
    assert check_batch(drafting=drafting).drafted


def test_a_request_that_needs_a_larger_cache_may_join() -> None:
    check_batch_that_grows()


def test_who_has_ended_costs_no_pass() -> None:
    check_passes_of_a_batch()


def test_what_prompts_share_is_computed_once_for_one_owner() -> None:
    check_owners()


def test_one_row_is_a_batch_too() -> None:
    assert_partly_accepted(check_batch(rows=1))


def test_answers_come_in_the_order_of_the_requests() -> None:
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    asked = [Request(PROMPTS[i % 4], 3 + 5 * i % 17) for i in range(11)]
    assert [one.tokens for one in decoder.generate_batch(asked, 3)] == [
        decoder.generate(one).tokens for one in asked
    ]
    assert decoder.generate_batch([]) == []


def test_in_exact_passes_a_row_is_the_same_to_the_bit_in_bfloat16() -> None:
    hf = tiny_llama().bfloat16()
    model = adapt(hf)
    plain = Decoder(model, exact=True)
    drafted = Decoder(model, MASKS[0], draft_length=3, exact=True)
    asked = [replace(guest.request, temperature=0.0) for guest in GUESTS]
    alone = [plain.generate(one).tokens for one in asked]
    found = drafted.generate_batch(asked, 4)
    assert [one.tokens for one in found] == alone
    assert_partly_accepted(sum((one.stats for one in found), DecodeStats()))


@pytest.mark.thorough
@pytest.mark.xdist_group("native")
def test_an_engine_that_keeps_bits_decodes_exactly_in_joined_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float32 would show sums in another order. Some passes must have several rows."""
    model, _ = tiny_native()
    decoder = Decoder(model, MASKS[0], draft_length=3, exact=True)
    asked = [replace(guest.request, end_on_repeat=None) for guest in GUESTS]
    alone = [decoder.generate(one) for one in asked]
    widest, real = 0, batch_module.run_batched

    def counting(wanted: Any) -> Any:
        nonlocal widest
        widest = max(widest, len(wanted))
        return real(wanted)

    monkeypatch.setattr(batch_module, "run_batched", counting)
    found = decoder.generate_batch(asked, 4)
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    assert widest == 4
    logits = [logits_of_rows(model, [prompt]) for prompt in PROMPTS]
    assert all(
        torch.equal(one[0], other)
        for one, other in zip(logits, logits_of_rows(model, PROMPTS), strict=True)
    )


def tiny_native() -> tuple[Any, Any]:
    hf = tiny_llama().float()
    model = adapt(hf)
    lean = fuse_model(hf, replace(model.spec, engine="lean"), family_of(hf.config))
    return wrap_engine(lean, "native"), hf


@no_grad
def logits_of_rows(model: Any, prompts: Any) -> list[torch.Tensor]:
    """Return logits after the first two tokens of each prompt, from one joined pass."""
    shared = SharedCache(model.spec.n_layers, len(prompts), 64)
    model.new_cache(1, 65)
    planner, rows = Planner(64, model.spec.device), []
    for i, prompt in enumerate(prompts):
        text = [*prompt, 7, 8, 9]
        row = RowCache(shared, i, lambda *wanted: None)
        run_pass(model, torch.tensor([text[:2]]), row, planner.plan_chain(0, 2))
        rows.append(
            PassRequest(
                model, torch.tensor([text[2:]]), row, planner.plan_chain(2, len(text) - 2), None
            )
        )
    return [logits[0] for logits in run_batched(rows)]


def test_a_request_that_makes_no_sense_is_refused_and_the_others_go_on() -> None:
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    batch = decoder.new_batch(2)
    row = batch.join(Request(PROMPTS[0], 9))
    with pytest.raises(DecodeError, match="the prompt is empty"):
        batch.join(Request((), 9))
    batch.join(Request(PROMPTS[1], 9))
    with pytest.raises(DecodeError, match="the batch has 2 rows and all are taken"):
        batch.join(Request(PROMPTS[1], 9))
    tokens: list[int] = []
    while not row.ended:
        batch.run_round()
        tokens += row.chunk.tokens if row.chunk else []
    assert tokens == decoder.generate(PROMPTS[0], 9).tokens
    with pytest.raises(DecodeError, match="max_requests is 0"):
        Batch(decoder.loop, 0)
    with pytest.raises(DecodeError, match="remember_tokens is -1"):
        Decoder(decoder.model, decoder.recipe, remember_tokens=-1)


def test_a_batch_allocates_nothing_before_a_request_joins() -> None:
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    refusal = AssertionError("a cache was allocated")
    with patch.object(type(decoder.model), "new_cache", side_effect=refusal):
        decoder.new_batch(2)


def test_what_ends_one_row_ends_no_other() -> None:
    """One row has a processor that fails, the other one that does not."""
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])

    def failing(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 8:
            raise ValueError("enough")
        return logits

    batch = decoder.new_batch(3)
    rows = [
        batch.join(Request(PROMPTS[0], 12)),
        batch.join(Request(PROMPTS[0], 12, processors=(failing,))),
        batch.join(Request(PROMPTS[2], 12, processors=(lambda ids, logits: logits,))),
    ]
    read: dict[Any, list[int]] = {row: [] for row in rows}
    while batch.running:
        for row in batch.run_round():
            read[row] += row.chunk.tokens if row.chunk else []
    assert isinstance(rows[1].error, ValueError)
    assert rows[0].error is rows[2].error is None
    assert read[rows[0]] == decoder.generate(PROMPTS[0], 12).tokens
    assert read[rows[2]] == decoder.generate(PROMPTS[2], 12).tokens


def test_a_model_that_breaks_ends_every_row_that_waited_for_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Decoder(tiny_model_and_reference()[0]).new_batch(2)
    rows = [batch.join(Request(prompt, 9)) for prompt in PROMPTS[:2]]
    batch.run_round()

    def breaks(wanted: Any) -> Any:
        raise ModelError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "run_batched", breaks)
        batch.run_round()
    assert [str(row.error) for row in rows] == ["broken"] * 2
    assert rows[0].error is not rows[1].error
    assert type(rows[0].error) is type(rows[1].error)
    assert batch.n_free == 2
    again = batch.join(Request(PROMPTS[0], 3))
    batch.run_round()
    assert again.error is None


def test_while_a_batch_is_crowded_nobody_drafts_and_greedy_tokens_stay() -> None:
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    asked = [Request(prompt, 8 + 4 * i) for i, prompt in enumerate(PROMPTS)]
    alone = [decoder.generate(one) for one in asked]
    decoder.plain_from_batch = 2
    found = decoder.generate_batch(asked, 4)
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    assert [one.stats.drafted > 0 for one in found] == [False, False, False, True], (
        "the last one drafts once it is alone"
    )
    decoder.plain_from_batch = None
    assert all(one.stats.drafted for one in decoder.generate_batch(asked, 4))


def test_a_traced_row_tells_what_was_proposed() -> None:
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    batch = decoder.new_batch(2)
    rows = [batch.join(Request(PROMPTS[0], 20), trace=True), batch.join(Request(PROMPTS[2], 20))]
    proposed: dict[Any, int] = dict.fromkeys(rows, 0)
    stats: dict[Any, DecodeStats] = {}
    while batch.running:
        for row in batch.run_round():
            assert row.chunk is not None
            proposed[row] += len(row.chunk.proposal.tokens) if row.chunk.proposal else 0
            stats |= {row: row.chunk.stats} if row.chunk.stats else {}
    assert proposed == {rows[0]: stats[rows[0]].drafted, rows[1]: 0}


def test_autograd_is_as_it_was_after_a_batch_that_was_left_half_way() -> None:
    batch = DRAFTINGS[0].decoder(tiny_model_and_reference()[0]).new_batch(3)
    for prompt in PROMPTS[:3]:
        batch.join(Request(prompt, 20))
    batch.run_round()
    batch.close()
    assert batch.n_free == 3
    assert torch.is_grad_enabled()


def test_two_threads_drive_a_batch_each() -> None:
    decoder = DRAFTINGS[0].decoder(tiny_model_and_reference()[0])
    asked = [guest.request for guest in GUESTS]
    alone = [decoder.generate(one).tokens for one in asked]
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        found[number] = [one.tokens for one in decoder.generate_batch(asked, 3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: alone, 1: alone}


def test_a_row_that_waits_for_its_turn_may_be_dropped_before_it_began() -> None:
    decoder = Decoder(tiny_model_and_reference()[0])
    batch = decoder.new_batch(2)
    first, second = batch.join(Request(PROMPTS[0], 4)), batch.join(Request(PROMPTS[1], 4))
    batch.drop(second)
    assert batch.run_round() == [first]
