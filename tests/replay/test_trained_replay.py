"""Drafts with trained weights are judged as those without: by replay, behind lookup or alone."""

from __future__ import annotations

import pytest
from helpers.modules import SMALL_MASK, module_folder, small_module
from helpers.tiny import tiny_model_and_reference
from tuning.small_search import COSTS

from replay.exact_replay import ExactReplay
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.trained.module_weights import load_drafting_model
from skipsearch.models import ModelAdapter
from skipsearch.replay.replay import Replay
from skipsearch.replay.trained_replay import TrainedDraft, load_trained_draft
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.recipe_shape import RECIPE_SHAPES

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))


def trained(noise: float) -> tuple[TrainedDraft, ModelAdapter]:
    """As replay takes it, and the model that drafts."""
    model, ref = tiny_model_and_reference()[0], small_module(noise, 4).module
    return load_trained_draft(model, ref, [module_folder()]), load_drafting_model(
        model, ref, [module_folder()]
    )


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(tiny_model_and_reference()[0], PROMPTS, 24, 6)


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_exact_replay_counts_what_decoding_with_the_module_counts(
    replay: Replay, noise: float
) -> None:
    model, (draft, drafting), policy = replay.model, trained(noise), DraftPolicy(4)
    decoder, total = (
        Decoder(model, Recipe((draft.make_spec(policy),)), module_folders=[module_folder()]),
        DecodeStats(),
    )
    for prompt in PROMPTS:
        total += decoder.generate(prompt, 24, end_on_repeat=6).stats
    found = ExactReplay(replay, 6).count_stats(SMALL_MASK, policy, drafting)
    assert (found.rounds, found.drafted, found.accepted) == (
        total.rounds,
        total.drafted,
        total.accepted,
    )
    assert 0 < found.accepted < found.drafted
    assert found != ExactReplay(replay, 6).count_stats(SMALL_MASK, policy), (
        "the model's own weights draft otherwise"
    )


def test_fast_replay_runs_the_weights_of_the_draft(replay: Replay) -> None:
    same, other = (trained(noise)[0].measure_alpha(replay) for noise in (0.0, 30.0))
    assert same == replay.measure_acceptance(SMALL_MASK)
    assert other < same


def test_the_best_recipes_of_a_module_are_of_the_shape_asked_for_and_name_it(
    replay: Replay,
) -> None:
    draft, _ = trained(0.1)
    objective = ReplayObjective(
        replay, COSTS, (*RECIPE_SHAPES["auto"], "adapted", "lookup,adapted")
    )
    alone, behind = (
        objective.best_trained(draft, after_lookup).recipe for after_lookup in (False, True)
    )
    assert (alone.shape, behind.shape) == ("adapted", "lookup,adapted")
    assert isinstance(behind.drafters[0], Lookup)
    for recipe in (alone, behind):
        assert isinstance(recipe.drafters[-1], Adapted)
        assert recipe.modules == (draft.ref,)
        assert recipe.mask(SMALL_MASK.n_layers) == SMALL_MASK
