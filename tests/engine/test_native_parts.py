"""Passes of the native engine in several calls have the bits of a pass in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from decoding.count_checks import recorded
from decoding.kangaroo_checks import PROMPTS, UNSURE, check_kangaroo_drafts, check_kangaroo_siblings
from helpers.marks import in_turn
from helpers.modules import module_folder, small_kangaroo
from helpers.tiny import tiny_model_and_reference, use_engine
from models.tiny import FUSABLE_NAMES, some_tokens
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.engine import forward, no_grad, resume_pass, run_layers
from skipsearch.engine.native import NativeAdapter
from skipsearch.errors import ModelError
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

from .test_native import CPU, DTYPES, native

pytestmark = pytest.mark.xdist_group("native")
Call = tuple[int, int, int]  # first layer, the layer behind the last, rows


class Shown(list[Tensor]):
    """What goes into some layers, layer 0 and the head among them."""

    layers: tuple[int, ...]

    def __call__(self, i: int, h: Tensor) -> None:
        assert i in self.layers
        self.append(h.clone())


@contextmanager
def calls() -> Iterator[list[Call]]:
    found, real = list[Call](), NativeAdapter.run_layers

    def run_layers(
        self: NativeAdapter,
        given: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask | bytes | None,
        first: int,
        last: int,
        *rest: bool,
    ) -> Tensor:
        found.append((first, last, given.shape[1]))
        return real(self, given, cache, plan, mask, first, last, *rest)

    with patch.object(NativeAdapter, "run_layers", run_layers):
        yield found


@no_grad
@pytest.mark.parametrize(("name", "dtype"), in_turn(FUSABLE_NAMES, DTYPES))
def test_a_pass_that_is_shown_or_goes_on_in_the_middle_has_the_bits_of_a_whole_one(
    name: str, dtype: torch.dtype
) -> None:
    model, tokens = native(name, dtype), some_tokens(24)
    n, planner = model.spec.n_layers, Planner(64, CPU)
    for mask in (None, SkipMask(n, (n - 1,), (0,))):
        whole, shown, parts = (model.new_cache(1, 64) for _ in range(3))
        plans = [planner.plan_chain(0, 20), planner.plan_chain(20, 4)]
        pieces = [tokens[:, :20], tokens[:, 20:]]
        look = Shown()
        look.layers = (0, 1, n)
        for piece, plan in zip(pieces, plans, strict=True):
            wanted = forward(model, piece, whole, plan, mask)
            assert torch.equal(forward(model, piece, shown, plan, mask, tap=look), wanted)
            h = model.run_layers(model.embed(piece, plan.positions), parts, plan, mask, 0, 1)
            assert torch.equal(h, look[-2])
            h = model.run_layers(h, parts, plan, mask, 1, n)
            assert torch.equal(h, look[-1])
            assert torch.equal(model.head(h), wanted)
            assert torch.equal(model.run_layers(look[-2], parts, plan, mask, 1, n, True), wanted)
            assert torch.equal(
                model.run_layers(piece, parts, plan, mask, 0, n, True, True), wanted[:, -1:]
            )
            look.layers = (1,)
            assert torch.equal(forward(model, piece, shown, plan, mask, tap=look), wanted)
            assert torch.equal(look[-1], look[-3])
            look.layers = (0, 1, n)
        for a, b, c in zip(
            (*whole.keys, *whole.values),
            (*shown.keys, *shown.values),
            (*parts.keys, *parts.values),
            strict=True,
        ):
            assert (a is None) == (b is None) == (c is None)
            assert a is None or (torch.equal(a, b) and torch.equal(a, c))


@no_grad
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_were_drafted_one_by_one_are_verified_to_the_bit_from_there_on(
    dtype: torch.dtype,
) -> None:
    model, tokens = native(FUSABLE_NAMES[0], dtype), some_tokens(24)
    n, planner = model.spec.n_layers, Planner(64, CPU)
    below = SkipMask.from_layers(n, range(1, n))
    whole, cache = model.new_cache(1, 64), model.new_cache(1, 64)
    for each in (whole, cache):
        forward(model, tokens[:, :20], each, planner.plan_chain(0, 20))
    wanted = forward(model, tokens[:, 20:], whole, planner.plan_chain(20, 4))
    reached = [
        run_layers(
            model, model.embed(tokens[:, at : at + 1]), cache, planner.plan_chain(at, 1), below
        )
        for at in (20, 21)
    ]
    assert torch.equal(
        resume_pass(
            model, torch.cat(reached, dim=1), 1, tokens[:, 22:], cache, planner.plan_chain(20, 4)
        ),
        wanted,
    )


def test_a_pass_over_nothing_is_nothing() -> None:
    model = native(FUSABLE_NAMES[0])
    cache, plan = model.new_cache(1, 64), Planner(64, CPU).plan_chain(0, 0)
    assert forward(model, torch.empty(1, 0, dtype=torch.long), cache, plan).shape == (
        1,
        0,
        model.spec.vocab_size,
    )
    assert (
        model.run_layers(
            torch.empty(1, 0, model.spec.hidden_size, dtype=model.spec.dtype),
            cache,
            plan,
            None,
            1,
            2,
        ).shape[1]
        == 0
    )


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_is_refused_and_reads_no_foreign_memory(token: int) -> None:
    model = native("llama-tied")
    with pytest.raises(ModelError, match=f"row {token} is outside"):
        model.embed(torch.tensor([[1, token]]))


def test_kangaroo_is_verified_from_the_exit_layer_on_in_one_call() -> None:
    spec = small_kangaroo("attention", 0.1, 5, UNSURE)
    with use_engine("native"):
        model, full = tiny_model_and_reference()
    n, out = model.spec.n_layers, spec.exit_layer
    for prompt in PROMPTS[:3]:
        with calls() as made:
            stats, rounds = recorded(model, full, Recipe((spec,)), [prompt], 20, [module_folder()])
        verified = [rows for first, last, rows in made if (first, last) == (out, n)]
        lengths = [len(found.chain) + 1 for found in rounds]
        undrafted = stats.rounds - len(rounds)
        assert verified == [len(prompt), *lengths, *[1] * undrafted], (
            "the prefill, a pass a round, and a last token that nobody drafted"
        )
        assert made.count((0, out, len(prompt))) >= 1
        assert (0, n) not in {(first, last) for first, last, _ in made}


def test_drafts_of_kangaroo_follow_the_definition_with_what_others_drafted_between() -> None:
    with use_engine("native"):
        check_kangaroo_drafts()
        check_kangaroo_siblings()
        model, full = tiny_model_and_reference()
        recipe = Recipe((Lookup(min_match=1, draft_length=3), small_kangaroo("layer", 0.1, 4)))
        stats, _ = recorded(model, full, recipe, PROMPTS, 20, [module_folder()])
        assert 0 < stats.accepted < stats.drafted


def test_a_part_that_begins_a_layer_too_late_is_noticed() -> None:
    real = NativeAdapter.run_layers

    def late(
        self: NativeAdapter,
        given: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: Any,
        first: int,
        last: int,
        *rest: bool,
    ) -> Tensor:
        return real(self, given, cache, plan, mask, first + (1 < first + 1 < last), last, *rest)

    with (
        use_engine("native"),
        patch.object(NativeAdapter, "run_layers", late),
        pytest.raises(AssertionError),
    ):
        check_kangaroo_drafts()
