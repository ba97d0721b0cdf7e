"""Fast replay against what it stands for: a draft pass on every position, fed one by one, and the
first draft of real rounds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import LAYERS, VOCAB, tiny_llama, tiny_model_and_reference, with_eos
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tiny import adapted

from skipsearch.core.mask import SkipMask
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.engine import forward
from skipsearch.errors import SearchError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.kv_cache import Planner
from skipsearch.replay import reference_text
from skipsearch.replay.generate_together import Continuation
from skipsearch.replay.replay import Replay

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7))
MASKS = (
    SkipMask(LAYERS, (1, 3), (2,)),
    SkipMask(LAYERS, (0,), (0, 4)),
    SkipMask(LAYERS, mlp=(1, 2, 3)),
)
TOKENS = 24

bits = st.lists(st.integers(0, 1), min_size=2 * LAYERS, max_size=2 * LAYERS).map(SkipMask.from_bits)


@cache
def world() -> tuple[ModelAdapter, Replay]:
    model, _ = tiny_model_and_reference()
    return model, Replay(model, PROMPTS, TOKENS, end_on_repeat=6)


@torch.no_grad()
def one_by_one(
    model: ModelAdapter, prompt: tuple[int, ...], generated: list[int], mask: SkipMask
) -> tuple[list[int], list[float]]:
    """Proposed token and its probability at each position: a fresh cache, the full model up to
    there, then one draft pass.
    """
    proposed, confidence = [], []
    for j in range(len(generated) - 1):
        text = torch.tensor([[*prompt, *generated[: j + 1]]])
        length = text.shape[1]
        cache, planner = model.new_cache(1, length), Planner(length, text.device)
        if length > 1:
            forward(model, text[:, :-1], cache, planner.plan_chain(0, length - 1))
        probs = forward(model, text[:, -1:], cache, planner.plan_chain(length - 1, 1), mask)[
            0, -1
        ].softmax(dim=-1)
        proposed.append(int(probs.argmax()))
        confidence.append(float(probs.max()))
    return proposed, confidence


def assert_equals_one_by_one(
    model: ModelAdapter, prompts: tuple[tuple[int, ...], ...], replay: Replay, mask: SkipMask
) -> None:
    for prompt, generated, replayed in zip(
        prompts, replay.continuations, replay(mask), strict=True
    ):
        proposed, confidence = one_by_one(model, prompt, generated, mask)
        assert replayed.acceptance.tolist() == [
            a == b for a, b in zip(proposed, generated[1:], strict=True)
        ]
        np.testing.assert_allclose(replayed.confidence, confidence, rtol=1e-4)


# --- equality with draft passes


@pytest.mark.parametrize("mask", MASKS)
def test_each_position_is_a_draft_pass_on_that_token_alone_behind_the_full_models_keys_and_values(
    mask: SkipMask,
) -> None:
    model, replay = world()
    assert 0 < replay.measure_acceptance(mask) < 1, (
        "a mask that agrees everywhere or nowhere shows nothing"
    )
    assert_equals_one_by_one(model, PROMPTS, replay, mask)


@given(mask=bits)
@settings(max_examples=5, deadline=None)
def test_that_holds_for_any_mask(mask: SkipMask) -> None:
    assert_equals_one_by_one(world()[0], PROMPTS, world()[1], mask)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen2", id="windows"),
        pytest.param("falcon-rw", id="biases by distance"),
        pytest.param("phi", id="parallel residuals"),
        pytest.param("opt", id="learned positions"),
    ],
)
def test_that_holds_for_models_with(family: str) -> None:
    model, prompts = adapted(family), ((5, 17, 40, 3, 8, 8, 21), (9, 2))
    replay = Replay(model, prompts, 20, end_on_repeat=None)
    for mask in (SkipMask(3, (1,)), SkipMask(3, (), (0, 2))):
        assert_equals_one_by_one(model, prompts, replay, mask)


@pytest.mark.parametrize("mask", MASKS)
def test_agreement_is_acceptance_of_the_first_draft_of_a_real_round(mask: SkipMask) -> None:
    model, replay = world()
    rounds = accepted = 0
    for prompt, replayed in zip(PROMPTS, replay(mask), strict=True):
        decoder = Decoder(model, mask, draft_length=1, exit_policy=make_exit("fixed"))
        at = 0
        for chunk in list(decoder.stream(prompt, TOKENS, end_on_repeat=6))[
            1:-1
        ]:  # the prefill's token; the last may be cut short
            assert len(chunk.tokens) == 1 + replayed.acceptance[at]
            at, rounds, accepted = (
                at + len(chunk.tokens),
                rounds + 1,
                accepted + len(chunk.tokens) - 1,
            )
    assert 0 < accepted < rounds


def test_a_replay_does_not_depend_on_the_prompts_that_share_its_passes() -> None:
    model, _ = tiny_model_and_reference()
    prompts = [tuple(range(i, i + 1 + i % 5)) for i in range(20)]
    together = Replay(model, prompts, 12, end_on_repeat=1)
    assert len({len(t) for t in together.continuations}) > 1
    for i, of_all in enumerate(together(MASKS[0])):
        (alone,) = Replay(model, prompts[i : i + 1], 12, end_on_repeat=1)(MASKS[0])
        assert np.array_equal(of_all.acceptance, alone.acceptance)
        np.testing.assert_allclose(of_all.confidence, alone.confidence, rtol=1e-4)


def test_a_part_of_the_prompts_will_do_for_a_ranking() -> None:
    model, _ = tiny_model_and_reference()
    replay = Replay(model, [(i,) for i in range(40)], 4, end_on_repeat=None)
    everything, some = replay(MASKS[0]), replay(MASKS[0], max_prompts=16)
    assert (len(everything), len(some)) == (40, 16)
    agrees = {tuple(r.acceptance) + tuple(r.confidence) for r in everything}
    assert all(tuple(r.acceptance) + tuple(r.confidence) in agrees for r in some)
    assert (
        replay.measure_acceptance(MASKS[0], 16)
        == np.concatenate([r.acceptance for r in some]).mean()
    )
    assert len(replay(MASKS[0], max_prompts=1000)) == 40


def test_a_draft_that_skips_nothing_agrees_everywhere() -> None:
    _, replay = world()
    assert all(r.acceptance.all() for r in replay(SkipMask(LAYERS)))
    assert replay.measure_acceptance(SkipMask(LAYERS)) == 1


def test_acceptance_is_the_share_of_positions_that_agree() -> None:
    _, replay = world()
    replayed = replay(MASKS[0])
    assert replay.measure_acceptance(MASKS[0]) == sum(r.acceptance.sum() for r in replayed) / sum(
        len(r.acceptance) for r in replayed
    )


@given(masks=st.lists(bits, min_size=2, max_size=4))
@settings(max_examples=15, deadline=None)
def test_no_replay_alters_what_a_later_one_sees(masks: list[SkipMask]) -> None:
    _, replay = world()
    first = replay(masks[0])
    for other in masks[1:]:
        replay(other)
    for before, after in zip(first, replay(masks[0]), strict=True):
        assert np.array_equal(before.acceptance, after.acceptance)
        assert np.array_equal(before.confidence, after.confidence)


# --- the text


def test_the_text_is_what_plain_decoding_of_the_same_request_writes() -> None:
    model, replay = world()
    assert replay.continuations == [
        Decoder(model).generate(p, TOKENS, end_on_repeat=6).tokens for p in PROMPTS
    ]


def test_drafts_may_be_as_long_as_the_request_allowed_also_if_the_text_ended_earlier() -> None:
    _, replay = world()
    assert [r.token_budget for r in replay(MASKS[0])] == [TOKENS - 1] * len(PROMPTS)


def test_room_ends_with_the_models_context() -> None:
    model = adapt(tiny_llama(context=32))
    replay = Replay(model, [tuple(range(20)), (1,)], TOKENS, end_on_repeat=None)
    assert [len(t) for t in replay.continuations] == [12, TOKENS]
    assert [r.token_budget for r in replay(MASKS[0])] == [11, TOKENS - 1]


def test_a_prompt_that_ends_with_its_first_token_has_nothing_to_replay() -> None:
    model, replay = world()
    ending = replay.continuations[0][0]
    cut = Replay(with_eos(model, ending), PROMPTS, TOKENS, end_on_repeat=6)
    assert cut.continuations[0] == [ending]
    assert len(cut(MASKS[0])) == sum(len(t) > 1 for t in cut.continuations) < len(PROMPTS)


def test_a_model_that_ends_every_prompt_at_once_is_refused() -> None:
    model, _ = world()
    with pytest.raises(SearchError, match="ends every calibration prompt with its first token"):
        Replay(with_eos(model, *range(VOCAB)), PROMPTS, TOKENS, end_on_repeat=6)


def test_a_model_that_loops_from_the_start_is_refused_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate(*arguments: Any, **settings: Any) -> list[Continuation]:
        return [Continuation([7] * 60), Continuation([5])]

    monkeypatch.setattr(reference_text, "generate_continuations", generate)
    with pytest.raises(SearchError, match="1 of 2 calibration prompts"):
        Replay(world()[0], PROMPTS[:2], TOKENS, end_on_repeat="loop")


def test_progress_counts_tokens() -> None:
    told: list[tuple[int, int]] = []
    Replay(
        world()[0],
        PROMPTS,
        3,
        end_on_repeat=None,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(3, 9), (6, 9), (9, 9), (9, 9)], "all of them in one batch"
