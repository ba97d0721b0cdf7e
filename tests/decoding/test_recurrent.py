"""Models with recurrent layers: greedy text is the full model's own, for all drafts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers.tiny import LAYERS

import skipsearch as ss
from skipsearch.core.recipe import Recipe, Siblings
from skipsearch.decoding import Decoder, Request
from skipsearch.decoding.batch import run_batch
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.exits import make_exit
from skipsearch.errors import DecodeError, SearchError

from .checks import MASKS, PROMPTS, Drafting, assert_partly_accepted
from .recurrent_checks import (
    CHAINS,
    KINDS,
    check_growing_recurrent,
    check_recurrent,
    recurrent_world,
)


@pytest.mark.parametrize(
    ("family", "draftings"),
    [
        pytest.param("lfm2", (CHAINS[0], CHAINS[-1]), id="lfm2"),
        *(
            pytest.param(family, draftings, id=name, marks=pytest.mark.thorough)
            for family, draftings, name in (
                ("lfm2", CHAINS, "lfm2, every chain"),
                *((family, CHAINS[:1], family) for family in KINDS if family != "lfm2"),
            )
        ),
    ],
)
def test_greedy_tokens_are_the_full_models_own(
    family: str, draftings: tuple[Drafting, ...]
) -> None:
    """Layers: linear attention, Mamba with attention, short convolutions, Mamba row by row."""
    model, _ = recurrent_world(family)
    assert model.spec.is_recurrent
    assert_partly_accepted(check_recurrent(family, draftings))


def test_a_session_that_grows_keeps_its_states() -> None:
    check_growing_recurrent()


def test_a_session_reuses_no_more_than_its_states_allow() -> None:
    """States exist for the beginning and for the end of the last pass.

    A prompt that differs before them is computed from its beginning.
    """
    model, full = recurrent_world("lfm2")
    session = Decoder(model, CHAINS[0].recipe).new_session()
    answer = session.generate(PROMPTS[2], 12).tokens
    assert session.count_shared([*PROMPTS[2], 1]) == 0
    again = [*PROMPTS[2], *answer]
    assert session.count_shared([*again, 5]) == len(session.cached_ids) > len(PROMPTS[2])
    assert session.generate([*again, 5, 6], 8).tokens == full.greedy([*again, 5, 6], 8)
    assert session.generate([*PROMPTS[2], 1], 8).tokens == full.greedy([*PROMPTS[2], 1], 8)


def test_streams_side_by_side_keep_states_of_their_own() -> None:
    model, full = recurrent_world("qwen3_5_text")
    streams = [CHAINS[0].decoder(model).stream(prompt, max_new_tokens=12) for prompt in PROMPTS[:2]]
    read: list[list[int]] = [[], []]
    for _ in range(12):
        for tokens, stream in zip(read, streams, strict=True):
            chunk = next(stream, None)
            tokens.extend(chunk.tokens if chunk else ())
    assert read == [full.greedy(prompt, 12) for prompt in PROMPTS[:2]]


def test_a_batch_gives_each_request_its_own_text() -> None:
    model, full = recurrent_world("lfm2")
    batch = Decoder(model, CHAINS[0].recipe).new_batch(3)
    found = run_batch(batch, [Request(prompt, 10) for prompt in PROMPTS])
    assert [one.tokens for one in found] == [full.greedy(prompt, 10) for prompt in PROMPTS]


def test_generate_takes_the_place_of_the_models_own() -> None:
    _, full = recurrent_world("lfm2")
    prompt = torch.tensor([PROMPTS[0]])
    mine = ss.generate(full.hf, prompt, profile=MASKS[0], max_new_tokens=12)
    assert mine[0, prompt.shape[1] :].tolist() == full.greedy(PROMPTS[0], 12)


@pytest.mark.parametrize(
    ("recipe", "exact", "said"),
    [
        (
            Drafting(MASKS[0], siblings=Siblings(below=0.6, most=2)).recipe,
            False,
            "leave siblings out",
        ),
        (
            Recipe((ASD(draft_length=4, exit=make_exit("fixed")),)),
            False,
            "draft with skip or lookup",
        ),
        (Drafting().recipe, True, "no exact mode"),
    ],
    ids=["siblings", "hidden states", "exact"],
)
def test_what_needs_more_than_a_chain_is_refused_in_a_sentence(
    recipe: Recipe, exact: bool, said: str
) -> None:
    model, _ = recurrent_world("lfm2")
    with pytest.raises(DecodeError, match=said) as caught:
        Decoder(model, recipe, exact=exact)
    assert "\n" not in str(caught.value)


def test_tuning_refuses_drafters_that_read_hidden_states_before_any_work() -> None:
    model = copy.copy(recurrent_world("lfm2")[0])
    model.spec = replace(model.spec, config_sha256="0" * 64, weights_sha256="0" * 64)
    with pytest.raises(SearchError, match="tune skip or lookup"):
        ss.tune(model, "no task is read", drafters="clasp")


def test_a_mask_covers_recurrent_sub_layers() -> None:
    """`attn` means the layer's mixer of any kind: a draft without one has other tokens."""
    model, _ = recurrent_world("lfm2")
    texts = [
        Decoder(model, ss.SkipMask(LAYERS, attn=(i,)), draft_length=3)
        .generate(PROMPTS[0], 20)
        .stats.accepted
        for i in range(LAYERS)
    ]
    whole = Decoder(model, ss.SkipMask(LAYERS), draft_length=3).generate(PROMPTS[0], 20).stats
    assert whole.accepted == whole.drafted
    assert max(texts) < whole.drafted
