"""Drafts with trained weights are judged as those without: by replay, behind lookup or alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from helpers.modules import (
    SMALL_MASK,
    module_folder,
    small_kangaroo,
    small_module,
    small_mtp,
    small_s3d,
)
from helpers.tiny import tiny_model_and_reference
from tuning.small_search import COSTS

from replay.exact_replay import ExactReplay
from skipsearch.core.cost_model import Costs, TimedDraftCosts
from skipsearch.core.reading import READ_ALL, Vocabulary
from skipsearch.core.recipe import DrafterSpec, Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.adapted.spec import Adapted
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.trained.module_weights import load_drafting_model
from skipsearch.models import ModelAdapter
from skipsearch.replay.replay import Replay
from skipsearch.replay.trained_replay import TrainedDraft, load_trained_draft
from skipsearch.timing.reading_costs import FormatCosts
from skipsearch.tuning import trained_candidates
from skipsearch.tuning.draft_timing import time_draft_steps
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.recipe_shape import RECIPE_SHAPES
from skipsearch.tuning.trained_candidates import TrainedCandidates

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
        Decoder(
            model, Recipe((draft.make_spec(policy, READ_ALL),)), module_folders=[module_folder()]
        ),
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
    candidates = TrainedCandidates(objective)
    alone, behind = (candidates.best(draft, after_lookup).recipe for after_lookup in (False, True))
    assert (alone.shape, behind.shape) == ("adapted", "lookup,adapted")
    assert isinstance(behind.drafters[0], Lookup)
    for recipe in (alone, behind):
        assert isinstance(recipe.drafters[-1], Adapted)
        assert recipe.modules == (draft.ref,)
        assert recipe.mask(SMALL_MASK.n_layers) == SMALL_MASK


@pytest.mark.parametrize(
    ("covers_text", "spec"),
    [
        (True, small_module(0.1, 4)),
        (False, small_kangaroo()),
        (True, small_s3d()),
        *(
            pytest.param(*pair, marks=pytest.mark.thorough)
            for pair in ((False, small_module(0.1, 4)), (True, small_kangaroo()))
        ),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_the_best_recipe_has_a_vocabulary_if_that_is_predicted_to_pay(
    replay: Replay, spec: DrafterSpec, covers_text: bool
) -> None:
    [ref] = spec.modules
    draft = load_trained_draft(replay.model, ref, [module_folder()])
    text = {token for text in replay.continuations for token in text}
    unused = set(range(64)) - text - {token for prompt in PROMPTS for token in prompt}
    few = Vocabulary(lowest=64, tokens="") if covers_text else Vocabulary.from_ids(unused)
    # Of a plain step, without the whole head: half, or all of it.
    share = 0.5 if covers_text else 1.0
    costs = {READ_ALL: FormatCosts(0.9 * share, 0.1 * share, 0.0, 0.0, 0.0)}
    objective = ReplayObjective(replay, COSTS, (*RECIPE_SHAPES["auto"], spec.kind))
    with (
        patch.object(trained_candidates, "list_vocabularies", lambda *_: iter([None, few])),
        patch.object(trained_candidates, "measure_format_costs", lambda *_, **__: costs),
    ):
        candidates = TrainedCandidates(objective)
        best = candidates.best(draft, after_lookup=False)
        [(whole, _), (restricted, _)] = candidates._replays[ref]
    assert best.recipe.drafters[-1].reading.vocabulary == (few if covers_text else None)
    if spec.kind != "s3d":
        accepted = restricted.accepted_len.mean() / whole.accepted_len.mean()
        assert accepted == 1 if covers_text else accepted < 1


@pytest.mark.parametrize("spec", [small_kangaroo(), small_mtp()], ids=lambda spec: spec.kind)
def test_drafts_that_the_latency_table_does_not_know_are_timed(
    replay: Replay, spec: DrafterSpec
) -> None:
    [ref] = spec.modules
    draft = load_trained_draft(replay.model, ref, [module_folder()])
    speedups, asked = list[float](), list[object]()
    for step_s in (0.0, 1.0):

        def timed(draft: TrainedDraft, *arguments: Any, step_s: float = step_s) -> Costs:
            asked.append(draft.ref)
            return TimedDraftCosts.from_costs(COSTS, step_s, step_s)

        objective = ReplayObjective(replay, COSTS, (*RECIPE_SHAPES["auto"], spec.kind))
        with patch.object(trained_candidates, "time_draft_steps", timed):
            candidates = TrainedCandidates(objective)
            speedups.append(candidates.best(draft, False).predicted_speedup or 0.0)
            candidates.best(draft, True)
    assert asked == [ref, ref], "alone and after lookup, a draft is timed once"
    assert speedups[0] > 1 > speedups[1]


def test_timing_a_draft_prices_whole_rounds(replay: Replay) -> None:
    [ref] = small_mtp().modules
    draft = load_trained_draft(replay.model, ref, [module_folder()])
    costs = time_draft_steps(draft, READ_ALL, replay, COSTS)
    assert isinstance(costs, TimedDraftCosts)
    assert costs.verify == COSTS.verify
    first, step = costs.first_step_s, costs.step_s
    assert first >= 0 <= step
    expected = [COSTS.verify[0]]
    expected += [first + (n - 1) * step + COSTS.verify_seconds(n) for n in (1, 2, 3)]
    assert costs.round_seconds(draft.mask, 3) == pytest.approx(expected)
