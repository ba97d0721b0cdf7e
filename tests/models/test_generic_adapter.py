"""A model driven by its own forward: what it was read as, what a draft leaves out, and what it does
not take.
"""

from __future__ import annotations

import pytest
import torch

import skipsearch as ss
from models.every_class import build
from models.tiny import Run, some_tokens
from skipsearch.core.mask import SkipMask
from skipsearch.engine.forward import forward, run_layer_loop
from skipsearch.errors import ModelError
from skipsearch.models.generic.generic_adapter import GenericAdapter
from skipsearch.models.kv_cache import Planner

LAYERS = 3


def own(family: str) -> GenericAdapter:
    adapter = ss.adapt(build(family))
    assert isinstance(adapter, GenericAdapter)
    return adapter


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("starcoder2", "by structure: layers at model.layers, attention self_attn, MLP mlp"),
        ("bloom", "by structure: layers at transformer.h, attention self_attention, MLP mlp"),
        ("biogpt", "by structure: layers at biogpt.layers, attention self_attn, MLP fc1, fc2"),
        (
            "granitemoe",
            "by structure: layers at model.layers, attention self_attn, MLP block_sparse_moe",
        ),
    ],
)
def test_it_says_what_it_was_read_as(family: str, said: str) -> None:
    assert own(family).description == said


@pytest.mark.parametrize(
    "family", ["starcoder2", "bloom", "biogpt", "gptj", "deepseek_v3", "gpt_oss", "mpt"]
)
@torch.no_grad()
def test_a_draft_leaves_out_what_its_mask_names(family: str) -> None:
    """A layer whose attention and MLP are off leaves its input as it is, and the passes agree with
    the layer loop.
    """
    model, tokens = own(family), some_tokens(9)
    full = Run(model)(tokens)
    for mask in (
        SkipMask(LAYERS, attn=(1,)),
        SkipMask(LAYERS, mlp=(2,)),
        SkipMask(LAYERS, attn=(0, 2), mlp=(2,)),
    ):
        cache, planner = model.new_cache(1, 16), Planner(16, model.spec.device)
        plan = planner.plan_chain(0, 9)
        whole = forward(model, tokens, cache, plan, mask)
        torch.testing.assert_close(
            whole, run_layer_loop(model, tokens, cache, plan, mask), rtol=1e-6, atol=1e-6
        )
        assert (whole[0] - full).abs().max() > 1e-3
    h, cache = model.embed(tokens, plan.positions), model.new_cache(1, 16)
    torch.testing.assert_close(model.block(0, h, cache, plan, attn=False, mlp=False), h)
    assert cache.keys[0] is None
    assert (
        forward(
            model, tokens, model.new_cache(1, 16), plan, SkipMask.from_layers(LAYERS, range(LAYERS))
        )
        .isfinite()
        .all()
    )


@torch.no_grad()
def test_it_costs_no_attention_that_is_off() -> None:
    model, tokens = own("starcoder2"), some_tokens(9)
    cache = model.new_cache(1, 16)
    forward(
        model,
        tokens,
        cache,
        Planner(16, model.spec.device).plan_chain(0, 9),
        SkipMask(LAYERS, attn=(0, 2)),
    )
    assert [keys is not None for keys in cache.keys] == [False, True, False]


def test_a_fused_engine_and_trained_drafts_need_a_row() -> None:
    from skipsearch.engine.on_same_engine import base_adapter

    with pytest.raises(
        ModelError, match=r"needs a family of the table.* is a arcee model driven by hf"
    ):
        base_adapter(own("arcee"))


@torch.no_grad()
def test_texts_of_several_lengths_are_refused_where_one_bias_serves_a_batch() -> None:
    model = own("mpt")
    assert (model.spec.ragged_batches, own("bloom").spec.ragged_batches) == (False, True)
    cache, planner = model.new_cache(2, 16), Planner(16, model.spec.device)
    tokens = some_tokens(6).repeat(2, 1)
    forward(model, tokens, cache, planner.plan_chain(0, 6, batch_size=2))
    positions = torch.tensor([[3, 4], [4, 5]])
    plan = planner.plan_replay(6, positions, positions, torch.tensor([0, 1]))
    with pytest.raises(ModelError, match="take one bias for all rows of a batch"):
        forward(model, tokens[:, :2], cache, plan)
