"""Replay of drafts that read less: at every position, what a draft pass there would propose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.tiny import LAYERS, VOCAB, tiny_model_and_reference, use_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading, Vocabulary
from skipsearch.engine.reduced_model import get_draft_copy
from skipsearch.models import ModelAdapter
from skipsearch.replay.replay import Replay

from .test_replay import MASKS, PROMPTS, TOKENS, one_by_one, world

pytestmark = pytest.mark.xdist_group("native")


@torch.no_grad()
def proposals_of(replay: Replay, prompt: int, mask: SkipMask, vocabulary: Vocabulary) -> list[int]:
    """The restricted draft's proposal at each position, by its definition."""
    model, text = replay.model, replay.continuations[prompt]
    others = {t for p, other in enumerate(replay.continuations) if p != prompt for t in other}
    own = set(text)
    static = {
        token
        for token in vocabulary.token_ids()
        if token < vocabulary.lowest or token in others or token not in own
    }
    proposed = []
    for j in range(len(text) - 1):
        known = {*static, *PROMPTS[prompt], *text[: j + 1]}
        logits = logits_at(model, PROMPTS[prompt], text[: j + 1], mask)
        proposed.append(max(sorted(known), key=lambda token: float(logits[token])))
    return proposed


def logits_at(
    model: ModelAdapter, prompt: tuple[int, ...], generated: list[int], mask: SkipMask
) -> torch.Tensor:
    from skipsearch.engine import forward
    from skipsearch.models.kv_cache import Planner

    text = torch.tensor([[*prompt, *generated]])
    length = text.shape[1]
    cache, planner = model.new_cache(1, length), Planner(length, text.device)
    if length > 1:
        forward(model, text[:, :-1], cache, planner.plan_chain(0, length - 1))
    return forward(model, text[:, -1:], cache, planner.plan_chain(length - 1, 1), mask)[0, -1]


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(0, VOCAB - 1), max_size=30), st.integers(0, 20))
def test_a_token_outside_the_vocabulary_and_the_text_so_far_is_never_proposed(
    tokens: set[int], lowest: int
) -> None:
    _, replay = world()
    vocabulary = Vocabulary.from_ids(tokens, lowest)
    restricted = replay.with_draft(None, vocabulary)(MASKS[0])
    for replayed in restricted:
        text = replay.continuations[replayed.prompt_index]
        proposed = proposals_of(replay, replayed.prompt_index, MASKS[0], vocabulary)
        expected = [a == b for a, b in zip(proposed, text[1:], strict=True)]
        assert replayed.acceptance.tolist() == expected


def test_several_vocabularies_are_judged_as_each_alone() -> None:
    _, replay = world()
    vocabularies = [None, Vocabulary.from_ids([3, 9, 40]), Vocabulary.from_ids(range(40), 10)]
    together = replay.judge(MASKS[1], vocabularies)
    for vocabulary, judged in zip(vocabularies, together, strict=True):
        alone = replay.with_draft(None, vocabulary)(MASKS[1])
        for a, b in zip(judged, alone, strict=True):
            assert np.array_equal(a.acceptance, b.acceptance)
            # The probability is over the known tokens alone, so its sum may round differently.
            np.testing.assert_allclose(a.confidence, b.confidence, rtol=1e-5)


def test_logits_of_tokens_that_no_draft_may_propose_are_not_computed() -> None:
    _, replay = world()
    few, more = Vocabulary.from_ids([3, 9, 40]), Vocabulary.from_ids([3, 9, 41, 50])
    known = {3, 9, 40, 41, 50, *(t for p in PROMPTS for t in p)}
    known |= {token for text in replay.continuations for token in text}
    _, rows = replay.restrict_head(replay.model, [few, more])
    assert rows is not None
    assert set(rows.token_ids.tolist()) == known
    assert len(known) < VOCAB
    _, rows = replay.restrict_head(replay.model, [few, None])
    assert rows is None, "a draft may propose all tokens"


def test_more_tokens_never_hide_a_right_one() -> None:
    """Of a draft with nothing skipped, every known token is right."""
    _, replay = world()
    nothing = SkipMask(LAYERS)
    shares = [
        np.concatenate([r.acceptance for r in judged]).mean()
        for judged in replay.judge(
            nothing, [Vocabulary.from_ids([], n) for n in (0, 16, 48)] + [None]
        )
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] == 1


@torch.no_grad()
def test_a_copy_in_fewer_bits_is_replayed_on_the_full_models_kv() -> None:
    with use_engine("native"):
        model, _ = tiny_model_and_reference()
        replay = Replay(model, PROMPTS, TOKENS, end_on_repeat=6)
        copied = get_draft_copy(model, "int4")
        [first, *_] = replay.with_draft(copied, None)(MASKS[2])
        text = replay.continuations[first.prompt_index]
        expected = []
        for j in range(len(text) - 1):
            # The prefix by the full model, the last token by the copy, on the same cache.
            from skipsearch.engine import forward
            from skipsearch.models.kv_cache import Planner

            ids = torch.tensor([[*PROMPTS[first.prompt_index], *text[: j + 1]]])
            length = ids.shape[1]
            cache, planner = model.new_cache(1, length), Planner(length, ids.device)
            if length > 1:
                forward(model, ids[:, :-1], cache, planner.plan_chain(0, length - 1))
            logits = forward(
                copied, ids[:, -1:], cache, planner.plan_chain(length - 1, 1), MASKS[2]
            )
            expected.append(int(logits[0, -1].argmax()) == text[j + 1])
    assert first.acceptance.tolist() == expected


def test_reading_of_everything_changes_nothing() -> None:
    model, replay = world()
    plain = replay(MASKS[0])
    assert Reading().is_everything
    same = replay.with_draft(None, Vocabulary.from_ids([], VOCAB))(MASKS[0])
    for a, b in zip(plain, same, strict=True):
        assert np.array_equal(a.acceptance, b.acceptance)
    proposed, _ = one_by_one(model, PROMPTS[0], replay.continuations[0], MASKS[0])
    assert len(proposed) == len(plain[0].acceptance)
