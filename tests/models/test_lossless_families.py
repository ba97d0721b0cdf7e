"""Greedy decoding with drafts gives the full model's own tokens, in every family."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.replay.replay import Replay

from .tiny import ADAPTED, LAYERS, adapted, hf_model, some_tokens

NEW = 12
every_model = pytest.mark.parametrize("name", ADAPTED)


def prompt() -> Tensor:
    return some_tokens(7)


@cache
def generated(family: str) -> list[int]:
    """What transformers' own loop generates."""
    theirs = hf_model(family).generate(  # type: ignore[operator]
        prompt(),
        attention_mask=torch.ones_like(prompt()),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
    )
    return theirs[0, prompt().shape[1] :].tolist()


@every_model
def test_drafting_changes_no_token(name: str) -> None:
    expected, accepted, drafted = generated(name.partition(":")[0]), 0, 0
    for mask in (SkipMask(LAYERS, mlp=(2,)), SkipMask(LAYERS, attn=(0, 2), mlp=(1,))):
        decoder = Decoder(adapted(name), mask, draft_length=4, exit_policy=make_exit("fixed"))
        result = decoder.generate(prompt(), max_new_tokens=NEW, ignore_eos=True)
        assert result.tokens == expected
        accepted, drafted = accepted + result.stats.accepted, drafted + result.stats.drafted
    assert 0 < accepted < drafted, "nothing is shown where every draft is right, or none"


@every_model
def test_plain_decoding_is_transformers_generate(name: str) -> None:
    result = Decoder(adapted(name)).generate(prompt(), max_new_tokens=NEW, ignore_eos=True)
    assert result.tokens == generated(name.partition(":")[0])


@every_model
def test_replaying_the_full_model_agrees_with_itself(name: str) -> None:
    """A replay asks every position at once, its own K/V behind the text: a window or a bias must go
    by positions there.
    """
    model = adapted(name)
    model.spec = replace(model.spec, eos_token_ids=())  # texts of full length
    replay = Replay(model, [some_tokens(7)[0].tolist(), some_tokens(12)[0].tolist()], NEW, None)
    replayed = replay(SkipMask(LAYERS))
    assert [len(one.acceptance) for one in replayed] == [NEW - 1, NEW - 1]
    assert all(one.acceptance.all() for one in replayed)
