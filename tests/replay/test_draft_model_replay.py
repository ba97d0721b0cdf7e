"""Replay of a second model counts what decoding with it counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.draft_models import draft_model_of, draft_spec, with_spec
from helpers.tiny import tiny_model_and_reference
from tuning.small_search import COSTS

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import READ_ALL, Reading, Vocabulary
from skipsearch.core.recipe import Recipe
from skipsearch.decoding import Decoder
from skipsearch.drafters.draft_model.shared_tokens import match_tokens
from skipsearch.engine.sampler import SamplingParams
from skipsearch.models import ModelAdapter
from skipsearch.replay.draft_model_replay import DraftModelReplay
from skipsearch.replay.replay import Replay
from skipsearch.tuning.draft_model_search import TriedDraftModel
from skipsearch.tuning.objective import ReplayObjective

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))


@pytest.fixture(scope="module")
def full() -> Replay:
    return Replay(tiny_model_and_reference()[0], PROMPTS, 24, None)


def replay_of(full: Replay, draft_model: ModelAdapter) -> DraftModelReplay:
    return DraftModelReplay(full, draft_model, match_tokens(draft_model, full.model))


@pytest.mark.parametrize(
    ("kind", "skipped"),
    [
        ("qwen2", (1,)),
        ("pruned", ()),
        ("recurrent", ()),
        pytest.param("qwen2", (), marks=pytest.mark.thorough),
        pytest.param("pruned", (1,), marks=pytest.mark.thorough),
    ],
    ids=lambda value: str(value),
)
def test_a_position_is_accepted_if_decoding_accepts_its_draft(
    full: Replay, kind: str, skipped: tuple[int, ...]
) -> None:
    draft_model, _ = draft_model_of(kind)
    mask = SkipMask(draft_model.spec.n_layers, skipped)
    judged = replay_of(full, draft_model)(mask)
    recipe = Recipe((draft_spec(draft_model, 1, attn=skipped),))
    for prompt, text, replayed in zip(PROMPTS, full.texts, judged, strict=True):
        for n, is_right in enumerate(replayed.acceptance):
            stats = Decoder(full.model, recipe).generate([*prompt, *text[:n]], 3).stats
            assert (stats.drafted, stats.accepted) == (1, int(is_right)), (prompt, n)
    share = np.concatenate([replayed.acceptance for replayed in judged]).mean()
    assert 0 < share < 1


def test_a_vocabulary_is_named_by_the_full_models_ids(full: Replay) -> None:
    draft_model, _ = draft_model_of("qwen2")
    replay, nothing = replay_of(full, draft_model), SkipMask(draft_model.spec.n_layers)
    some = Vocabulary(lowest=20, tokens="")
    whole, restricted = replay.judge(nothing, [None, some])
    assert sum(r.acceptance.sum() for r in restricted) < sum(r.acceptance.sum() for r in whole)


def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(full: Replay) -> None:
    draft_model, _ = draft_model_of("qwen2")
    short = with_spec(draft_model, context_length=14)
    nothing = SkipMask(draft_model.spec.n_layers)
    for whole, cut in zip(
        replay_of(full, draft_model)(nothing), replay_of(full, short)(nothing), strict=True
    ):
        known = max(0, 14 - len(full.prompt_ids[whole.prompt_index]))
        assert whole.acceptance[:known].tolist() == cut.acceptance[:known].tolist()
        assert not cut.acceptance[known:].any()
        assert not cut.confidence[known:].any()


def test_sampled_text_is_accepted_with_the_ratio_of_both_probabilities() -> None:
    model, reference = tiny_model_and_reference()
    full = Replay(model, PROMPTS[:1], 8, None, sampling=SamplingParams(1.0))
    draft_model, own = draft_model_of("qwen2")
    [replayed] = replay_of(full, draft_model)(SkipMask(draft_model.spec.n_layers))
    text = [*PROMPTS[0], *full.texts[0]]
    for j, acceptance in enumerate(replayed.acceptance):
        history = text[: len(PROMPTS[0]) + j + 1]
        q, p = (
            torch.from_numpy(view.next_logits(history)).softmax(-1)[text[len(history)]]
            for view in (own, reference)
        )
        assert acceptance == pytest.approx(float(min(1.0, q / p)), abs=1e-5)


def test_a_candidate_names_the_draft_model_its_mask_and_its_reading(full: Replay) -> None:
    draft_model, _ = draft_model_of("qwen2")
    ref = draft_spec(draft_model).model
    tried = TriedDraftModel(draft_model, ref, match_tokens(draft_model, full.model))
    n, reading = draft_model.spec.n_layers, Reading(vocabulary=Vocabulary(lowest=30, tokens=""))
    mask, costs = SkipMask(n, (1,)), replace(COSTS, sublayers=COSTS.sublayers[: 2 * n])
    objective = ReplayObjective(
        replay_of(full, draft_model), costs, ("skip", "lookup,skip"), make_spec=tried.make_spec
    ).with_reading(reading, None, costs)
    candidate = objective.best_recipe(mask, after_lookup=True, fine=True)
    assert candidate.recipe.shape == "lookup,draft-model"
    spec = candidate.recipe.drafters[-1]
    assert (spec.draft_model, spec.reading) == (ref, reading)
    assert spec.own_mask == mask  # type: ignore[attr-defined]
    assert (
        ReplayObjective(replay_of(full, draft_model), costs, make_spec=tried.make_spec)
        .fresh_copy()
        .best_recipe(mask)
        .recipe.drafters[-1]
        .reading
        == READ_ALL
    )
