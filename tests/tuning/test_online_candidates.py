"""Which settings of drafters that choose their masks are raced, and how replay judges a mask of
each prompt's own.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from decoding.dynamic_mask_checks import FIXED, noted
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp.spec import CLaSp
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.drafters.swift.spec import SWIFT
from skipsearch.engine.sampler import SamplingParams
from skipsearch.replay.replay import Replay
from skipsearch.replay.rounds import rounds_from_replay
from skipsearch.replay.simulate import simulate
from skipsearch.replay.workload import Workload
from skipsearch.tuning import online_candidates as module
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.online_candidates import list_online_candidates
from skipsearch.tuning.per_prompt import PerPromptObjective, mask_from_prefill
from skipsearch.tuning.recipe_shape import ONLINE_DRAFTERS, RecipeShape
from tuning.small_search import COSTS

PROMPTS = ((5, 17, 40, 3), (0,), (60, 2, 2, 31, 8, 44, 21, 13, 7), (33, 34))
SHAPES = tuple(f"{before}{kind}" for before in ("", "lookup,") for kind in ONLINE_DRAFTERS)
MASK = SkipMask(LAYERS, (1, 3), (2,))
POLICIES = [DraftPolicy(n) for n in (1, 2, 4)]


@cache
def objective() -> ReplayObjective:
    return ReplayObjective(Replay(tiny_model_and_reference()[0], PROMPTS, 24, 6), COSTS, SHAPES)


def test_one_mask_for_all_prompts_is_judged_as_if_each_had_it_of_its_own() -> None:
    each, rounds = PerPromptObjective(objective(), 8), rounds_from_replay(objective().replay(MASK))
    assert each.prompt_indices == list(range(len(PROMPTS)))
    together = [simulate(rounds, MASK, policy, COSTS).seconds.sum() for policy in POLICIES]
    assert each.predict_seconds(
        dict.fromkeys(each.prompt_indices, MASK), POLICIES, ()
    ) == pytest.approx(np.array(together))


def test_prompts_may_have_masks_that_differ_and_one_that_skips_nothing_is_decoded_plainly() -> None:
    each, other, none = (
        PerPromptObjective(objective(), 8),
        SkipMask(LAYERS, (0, 2), ()),
        SkipMask(LAYERS),
    )
    masks = {0: MASK, 1: other, 2: none}
    apart = [
        simulate(
            rounds_from_replay(objective().replay.single_prompt(p)(masks[p])),
            masks[p],
            POLICIES[1],
            COSTS,
        ).seconds.sum()
        for p in (0, 1)
    ]
    plain = (len(objective().replay.continuations[2]) - 1) * COSTS.verify[0]
    assert each.predict_seconds(masks, POLICIES, ())[1] == pytest.approx(sum(apart) + plain)
    found = each.best_recipe(
        masks,
        lambda policy: CLaSp(skip=1, draft_length=policy.draft_length, exit=policy.exit),
        RecipeShape("clasp"),
    )
    assert found.prediction.seconds.sum() == pytest.approx(
        each.predict_seconds(
            masks,
            [DraftPolicy(found.recipe.drafters[0].draft_length, found.recipe.drafters[0].exit)],
            (),
        )[0]
    )  # type: ignore[attr-defined]
    assert found.prediction.tokens.tolist() == [
        len(objective().replay.continuations[p]) - 1 for p in masks
    ]


@pytest.mark.parametrize(
    "spec",
    [
        ASD(threshold=0.93, every=3, keep_last=1, draft_length=3, exit=FIXED),
        CLaSp(skip=2, interval=100, draft_length=3, exit=FIXED),
    ],
    ids=lambda s: s.kind,
)
def test_a_prompt_is_read_as_decoding_reads_it(spec: ASD | CLaSp) -> None:
    model, _ = tiny_model_and_reference()
    decoder, [drafter] = noted(model, Recipe((spec,)))
    for prompt in PROMPTS:
        decoder.generate(prompt, 3)
    masks = [
        mask_from_prefill(model, spec.build(model, []).make_policy(), prompt) for prompt in PROMPTS
    ]  # type: ignore[attr-defined]
    assert masks == [session.mask_history[0][1] for session in drafter.sessions]


@pytest.mark.parametrize("shape", SHAPES)
def test_contenders_have_the_shape_asked_for_and_differ(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SWIFT_WINDOWS", ((4, 1), (6, 2)))
    kind, done = shape.rpartition(",")[2], list[tuple[int, int]]()
    work = Workload(tuple(map(str, PROMPTS)), PROMPTS, 24, 6, SamplingParams())
    found = list_online_candidates(
        RecipeShape.parse(shape), objective(), work, lambda *how_far: done.append(how_far)
    )
    recipes = [contender.recipe for contender in found]
    assert {recipe.shape for recipe in recipes} == {shape}
    assert len(set(recipes)) == len(recipes) > 1
    assert all(0 <= part <= whole for part, whole in done)
    assert len(done) > 4
    exact = [contender.seconds_per_token for contender in found if contender.prediction]
    assert exact == sorted(exact)
    assert bool(exact) == (kind != "swift"), "nothing predicts what a search finds"
    last = [recipe.drafters[-1] for recipe in recipes]
    if kind == "clasp":
        assert {spec.unit for spec in last} <= {"layer", "sublayer"}
        assert len({spec.interval for spec in last}) > 2
    if kind == "swift":
        assert all(
            isinstance(spec, SWIFT) and (spec.window, spec.interval) in ((4, 1), (6, 2))
            for spec in last
        )
        assert any(spec.tree for spec in last)
