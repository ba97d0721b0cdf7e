"""Full, draft and verify passes are one function, with another mask or plan."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import LAYERS, tiny_model_and_reference
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from skipsearch.core.mask import SkipMask
from skipsearch.engine import forward, no_grad
from skipsearch.models import adapt
from skipsearch.models.kv_cache import KVCache, Planner

TOKENS = [5, 17, 40, 3, 22, 9, 60, 31]
MASK = SkipMask(LAYERS, (1, 3), (0, 4))


def fresh() -> tuple[KVCache, Planner]:
    model, _ = tiny_model_and_reference()
    return model.new_cache(1, 32), Planner(32, torch.device("cpu"))


@no_grad
def passes(*sizes: int, mask: SkipMask | None = None, last_only: bool = False) -> Tensor:
    """Logits of TOKENS, fed in passes of these sizes."""
    model, _ = tiny_model_and_reference()
    cache, planner = fresh()
    out, at = [], 0
    for size in sizes:
        out.append(
            forward(
                model,
                torch.tensor([TOKENS[at : at + size]]),
                cache,
                planner.plan_chain(at, size),
                mask,
                last_only,
            )
        )
        at += size
    return torch.cat(out, dim=1)


def of_hugging_face() -> Tensor:
    _, full = tiny_model_and_reference()
    return full.hf(torch.tensor([TOKENS]), use_cache=False).logits


@pytest.mark.parametrize("sizes", [(8,), (1,) * 8, (3, 5), (4, 1, 3), (1, 7)])
def test_a_full_pass_in_pieces_is_hugging_faces_own_in_one(sizes: tuple[int, ...]) -> None:
    torch.testing.assert_close(passes(*sizes), of_hugging_face(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 5), (2, 6)])
def test_a_draft_pass_does_not_depend_on_its_pieces_either(sizes: tuple[int, ...]) -> None:
    torch.testing.assert_close(passes(*sizes, mask=MASK), passes(8, mask=MASK), rtol=0, atol=1e-12)


def test_an_empty_mask_is_the_full_pass() -> None:
    assert torch.equal(passes(8, mask=SkipMask(LAYERS)), passes(8))


def test_skipping_every_sublayer_leaves_embedding_norm_and_head() -> None:
    _, full = tiny_model_and_reference()
    hf = full.hf
    expected = hf.lm_head(hf.model.norm(hf.model.embed_tokens(torch.tensor([TOKENS]))))
    assert torch.equal(passes(8, mask=SkipMask.from_layers(LAYERS, range(LAYERS))), expected)


@pytest.mark.parametrize("sublayer", range(2 * LAYERS))
def test_every_sublayer_counts(sublayer: int) -> None:
    assert not torch.allclose(
        passes(8, mask=SkipMask.from_sublayers(LAYERS, [sublayer])), passes(8)
    )


def test_a_prefill_may_ask_for_its_last_logits_only() -> None:
    last = passes(8, last_only=True)
    assert last.shape == (1, 1, 64)
    torch.testing.assert_close(last[:, 0], passes(8)[:, -1])


@no_grad
def test_a_verify_pass_writes_over_every_key_and_value_that_a_draft_left() -> None:
    model, _ = tiny_model_and_reference()
    tokens = torch.tensor([TOKENS])
    drafted, planner = fresh()
    untouched, _ = fresh()
    forward(model, tokens[:, :4], drafted, planner.plan_chain(0, 4))
    for i in range(4, 8):
        forward(model, tokens[:, i : i + 1], drafted, planner.plan_chain(i, 1), MASK)
    forward(model, tokens[:, 4:], drafted, planner.plan_chain(4, 4))
    forward(model, tokens[:, :4], untouched, planner.plan_chain(0, 4))
    forward(model, tokens[:, 4:], untouched, planner.plan_chain(4, 4))
    for a, b in zip(
        (*drafted.keys, *drafted.values), (*untouched.keys, *untouched.values), strict=True
    ):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_a_model_that_learned_its_positions_is_told_them_by_every_pass() -> None:
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    hf = GPT2LMHeadModel(config).double().eval().requires_grad_(False)
    model, tokens = adapt(hf), torch.tensor([TOKENS])
    cache, planner = model.new_cache(1, 32), Planner(32, torch.device("cpu"))
    pieces = [
        forward(model, tokens[:, a:b], cache, planner.plan_chain(a, b - a))
        for a, b in ((0, 3), (3, 4), (4, 8))
    ]
    torch.testing.assert_close(
        torch.cat(pieces, dim=1), hf(tokens, use_cache=False).logits, rtol=0, atol=1e-12
    )


@no_grad
def test_a_pass_does_not_move_the_caches_length() -> None:
    model, _ = tiny_model_and_reference()
    cache, planner = fresh()
    forward(model, torch.tensor([TOKENS]), cache, planner.plan_chain(0, 8))
    assert cache.length == 0


def test_inference_runs_without_gradients_and_its_tensors_can_still_be_used_with_them() -> None:
    weight = torch.ones(2, requires_grad=True)
    out = no_grad(lambda: weight * 2)()
    assert not out.requires_grad
    (weight * out).sum().backward()
    assert weight.grad is not None
