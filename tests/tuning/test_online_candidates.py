"""Which settings of drafters that choose their masks are raced."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch.drafters.asd.rule import select_sublayers
from skipsearch.errors import SearchError
from skipsearch.replay.replay import Replay
from skipsearch.tuning.objective import ReplayObjective
from skipsearch.tuning.online_candidates import _list_settings, list_online_candidates
from skipsearch.tuning.recipe_shape import ONLINE_DRAFTERS, RecipeShape
from tuning.small_search import COSTS

PROMPTS = ((5, 17, 40, 3), (0,), (33, 34))
SHAPES = tuple(f"{before}{kind}" for before in ("", "lookup,") for kind in ONLINE_DRAFTERS)


@cache
def objective() -> ReplayObjective:
    return ReplayObjective(Replay(tiny_model_and_reference()[0], PROMPTS, 24, 6), COSTS, SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_contenders_have_the_shape_asked_for_differ_and_can_be_built(shape: str) -> None:
    model, _ = tiny_model_and_reference()
    recipes = [c.recipe for c in list_online_candidates(RecipeShape.parse(shape), objective())]
    assert {recipe.shape for recipe in recipes} == {shape}
    assert len(set(recipes)) == len(recipes) > 4
    for recipe in recipes:
        drafter = recipe.drafters[-1]
        assert drafter.draft_length <= len(COSTS.verify) - 1, "as far as passes were timed"
        drafter.build(model, [])


def test_a_model_of_which_nothing_can_be_skipped_is_refused() -> None:
    model = SimpleNamespace(spec=SimpleNamespace(n_layers=1))
    of_one_layer = SimpleNamespace(
        replay=SimpleNamespace(model=model), list_lookups=lambda after_lookup: [()]
    )
    with pytest.raises(SearchError, match="asd has no setting that skips anything of a model with"):
        list_online_candidates(RecipeShape("asd"), of_one_layer)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_layers", [1, 2, 3, LAYERS, 40])
def test_no_contender_skips_nothing_however_small_the_model_is(n_layers: int) -> None:
    for setting in _list_settings("asd", n_layers):
        skipped, _ = select_sublayers(
            [0.0] * n_layers, setting["threshold"], setting["every"], setting["keep_last"]
        )
        assert skipped
    for setting in _list_settings("clasp", n_layers):
        units = n_layers if setting["unit"] == "layer" else 2 * n_layers
        assert 0 < setting["skip"] < units
    for setting in _list_settings("swift", n_layers):
        assert int(setting["skip_ratio"] * 2 * (n_layers - 2)) > 0
