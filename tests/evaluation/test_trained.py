"""Drafts with trained weights are judged as those without: by replay, behind lookup or alone."""

from __future__ import annotations

import pytest
from helpers.modules import MASK, folder, small_module
from helpers.tiny import small_world

from skipsearch.decoding import Decoder
from skipsearch.drafters.adapted import Adapted
from skipsearch.drafters.lookup import Lookup
from skipsearch.evaluation.exact_replay import ExactReplay
from skipsearch.evaluation.objectives import ADAPTED, LOOKUP_ADAPTED, SHAPES, ReplayObjective, TrainedDraft
from skipsearch.evaluation.replay import Replay
from skipsearch.exits import DraftPolicy
from skipsearch.modules.weights import drafting_model
from skipsearch.recipe import Recipe
from skipsearch.stats import DecodeStats

from .small_search import COSTS

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))


def trained(noise: float) -> TrainedDraft:
    model, _ = small_world()
    spec = small_module(noise, 4)
    return TrainedDraft(spec.module, MASK, drafting_model(model, spec.module, [folder()]))


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(small_world()[0], PROMPTS, 24, 6)


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_exact_replay_counts_what_decoding_with_the_module_counts(replay: Replay, noise: float) -> None:
    model, draft, policy = replay.model, trained(noise), DraftPolicy(4)
    decoder, total = Decoder(model, Recipe((draft.spec(MASK, policy),)), modules=[folder()]), DecodeStats()
    for prompt in PROMPTS:
        total += decoder.generate(prompt, 24, end_on_repeat=6).stats
    found = ExactReplay(replay, 6).stats(MASK, policy, draft.model)
    assert (found.rounds, found.drafted, found.accepted) == (total.rounds, total.drafted, total.accepted)
    assert 0 < found.accepted < found.drafted
    assert found != ExactReplay(replay, 6).stats(MASK, policy), "the model's own weights draft otherwise"


def test_fast_replay_runs_the_weights_of_the_draft(replay: Replay) -> None:
    same, other = trained(0.0), trained(30.0)
    assert replay.acceptance(MASK, draft=same.model) == replay.acceptance(MASK)
    assert replay.acceptance(MASK, draft=other.model) < replay.acceptance(MASK)


def test_the_best_recipes_of_a_module_are_of_the_shape_asked_for_and_name_it(replay: Replay) -> None:
    draft = trained(0.1)
    objective = ReplayObjective(replay, COSTS, (*SHAPES["auto"], ADAPTED, LOOKUP_ADAPTED))
    alone, behind = (objective.best_trained(draft, shape).recipe for shape in (ADAPTED, LOOKUP_ADAPTED))
    assert (alone.shape, behind.shape) == (ADAPTED, LOOKUP_ADAPTED)
    assert isinstance(behind.drafters[0], Lookup)
    for recipe in (alone, behind):
        assert isinstance(recipe.drafters[-1], Adapted)
        assert recipe.modules == (draft.ref,)
        assert recipe.mask(MASK.n_layers) == MASK
