"""What every family must keep to, on tiny random models in fp64: the adapter is the Hugging Face
model, cut at its sub-layers.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.models import adapt
from skipsearch.models.families.table import FAMILIES
from skipsearch.models.kv_cache import PassPlan

from .tiny import (
    ADAPTED,
    LAYERS,
    TINY,
    Run,
    adapted,
    full_logits,
    hf_model,
    logits_without,
    new_hf_model,
    some_tokens,
    tiny_of,
)

WINDOWED = [
    name
    for name in ADAPTED
    if tiny_of(name).config.get("text_config", tiny_of(name).config).get("sliding_window") == 8
]
every_model = pytest.mark.parametrize("name", ADAPTED)


def same(mine: Tensor, theirs: Tensor) -> None:
    # Weights are fp64, but models round to fp32 in norms, rotary embeddings and eager softmax: a
    # last bit may flip there.
    assert mine.dtype == torch.float64
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_every_family_of_the_table_is_under_contract() -> None:
    assert {tiny.family for tiny in TINY.values()} == set(FAMILIES)


@every_model
def test_prefill_gives_the_full_models_logits(name: str) -> None:
    tokens = some_tokens(11)
    same(Run(adapted(name))(tokens), full_logits(name, tokens))


@every_model
def test_passes_of_any_length_at_any_offset_give_the_full_models_logits(name: str) -> None:
    tokens = some_tokens(24)
    run = Run(adapted(name))
    cuts = [0, 5, 6, 7, 11, 12, 20, 24]
    mine = torch.cat([run.commit(tokens[:, a:b]) for a, b in itertools.pairwise(cuts)])
    same(mine, full_logits(name, tokens))


@every_model
def test_rejected_tokens_leave_no_trace_once_their_slots_are_written_again(name: str) -> None:
    tokens, wrong = some_tokens(24), some_tokens(24, seed=7)
    run = Run(adapted(name))
    pieces = [run.commit(tokens[:, :9])]
    for start, end in itertools.pairwise([9, 12, 13, 18, 24]):
        for token in wrong[
            :, start : start + 4
        ].T:  # a draft with a sub-layer less writes wrong K/V, one token at a time
            run(token[None], SkipMask(LAYERS, attn=(1,), mlp=(0,)))
            run.cache.length += 1
        run.cache.length = start
        run(
            torch.cat([tokens[:, start : start + 1], wrong[:, start : start + 5]], dim=1)
        )  # a verify pass that is rejected
        pieces.append(run.commit(tokens[:, start:end]))
    same(torch.cat(pieces), full_logits(name, tokens))


@every_model
def test_each_bit_of_a_mask_removes_that_sub_layers_branch(name: str) -> None:
    tokens = some_tokens(9)
    model, full = adapted(name), full_logits(name, tokens)
    for sublayer in range(2 * LAYERS):
        mask = SkipMask.from_sublayers(LAYERS, [sublayer])
        mine, theirs = Run(model)(tokens, mask), logits_without(name, tokens, mask)
        same(mine, theirs)
        assert (mine - full).abs().max() > 1e-3, (
            f"sub-layer {sublayer} changes nothing, so this test would not see it skipped"
        )


@every_model
def test_masks_of_many_bits_skip_them_all_step_by_step(name: str) -> None:
    tokens = some_tokens(9)
    for mask in (
        SkipMask(LAYERS, attn=(0, 2), mlp=(1, 2)),
        SkipMask(LAYERS, attn=(0, 1, 2)),
        SkipMask(LAYERS, mlp=(0, 1, 2)),
        SkipMask.from_layers(LAYERS, [0, 1]),
    ):
        run = Run(adapted(name))
        steps = []
        for token in tokens.T:
            steps.append(run(token[None], mask))
            run.cache.length += 1
        same(torch.cat(steps), logits_without(name, tokens, mask))


@pytest.mark.parametrize("name", WINDOWED)
def test_a_sliding_window_of_8_over_40_tokens_is_the_full_models(name: str) -> None:
    """One token at a time, and in rounds that draft, verify and roll back."""
    tokens, wrong = some_tokens(40), some_tokens(40, seed=7)
    expected = full_logits(name, tokens)
    run, rounds = Run(adapted(name)), Run(adapted(name))
    same(torch.cat([run.commit(token[None]) for token in tokens.T]), expected)

    pieces = [rounds.commit(tokens[:, :5])]
    while rounds.cache.length < 40:
        start, kept = rounds.cache.length, 1 + rounds.cache.length % 3
        for n, token in enumerate(wrong[:, start : start + 4].T):
            rounds.cache.length = start + n
            rounds(token[None], SkipMask(LAYERS, attn=(1,), mlp=(2,)))
        rounds.cache.length = start
        verified = torch.cat(
            [tokens[:, start : start + kept], wrong[:, start + kept : start + 6]], dim=1
        )
        pieces.append(rounds(verified)[:kept])
        rounds.cache.length += min(kept, 40 - start)
    same(torch.cat(pieces)[:40], expected)


@every_model
def test_siblings_of_a_tree_share_a_position_and_do_not_see_each_other(name: str) -> None:
    """A root with two children, one of which has a child: each path gives the logits of that text
    alone.
    """
    text, (b, c, d) = some_tokens(11), some_tokens(3, seed=5)[0].tolist()
    run = Run(adapted(name))
    run.commit(text[:, :10])
    own = torch.tensor(
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool
    )  # root; b; c; d after b
    shown = torch.cat([torch.ones(4, 10, dtype=torch.bool), own], dim=1)[None, None]
    plan = PassPlan(
        torch.tensor([[10, 11, 11, 12]]),
        torch.tensor([[10, 11, 12, 13]]),
        n_keys=14,
        mask=shown,
        first_slot=10,
    )
    tree = run.layers(torch.tensor([[int(text[0, 10]), b, c, d]]), plan, None)
    for rows, path in (([0, 1, 3], [b, d]), ([0, 2], [c])):
        same(tree[rows], full_logits(name, torch.cat([text, torch.tensor([path])], dim=1))[10:])


@every_model
def test_a_batch_of_rows_gives_each_row_its_own_logits(name: str) -> None:
    rows = torch.cat([some_tokens(8, seed=3), some_tokens(8, seed=4)])
    run = Run(adapted(name))
    cache = run.model.new_cache(2, 32)
    with torch.no_grad():
        halves = []
        for start, end in ((0, 5), (5, 8)):
            plan = run.planner.plan_chain(start, end - start, batch_size=2)
            h = run.model.embed(rows[:, start:end], plan.positions)
            for i in range(LAYERS):
                h = run.model.block(i, h, cache, plan)
            halves.append(run.model.head(h))
    mine = torch.cat(halves, dim=1)
    same(mine[0], full_logits(name, rows[:1]))
    same(mine[1], full_logits(name, rows[1:]))


@pytest.mark.parametrize("name", TINY)
def test_adapting_a_model_does_not_alter_it(name: str, tmp_path: Path) -> None:
    model, tokens = new_hf_model(name), some_tokens(7)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    config, before = copy.deepcopy(model.config.to_dict()), model(input_ids=tokens).logits
    modules = [key for key, _ in model.named_modules()]

    Run(adapt(model))(tokens, SkipMask(LAYERS, attn=(1,)))

    assert torch.equal(model(input_ids=tokens).logits, before)
    assert model.config.to_dict() == config
    assert [key for key, _ in model.named_modules()] == modules
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(
        tmp_path / "saved", dtype=torch.float64, experts_implementation="eager"
    )
    same(again(input_ids=tokens).logits, before)
    halved = model.to(torch.float32)
    torch.testing.assert_close(
        halved(input_ids=tokens).logits, before.float(), rtol=1e-3, atol=1e-3
    )


def test_no_test_altered_the_shared_models() -> None:
    for name in TINY:
        fresh, shared = new_hf_model(name), hf_model(name)
        assert all(
            torch.equal(a, b)
            for a, b in zip(fresh.state_dict().values(), shared.state_dict().values(), strict=True)
        )
