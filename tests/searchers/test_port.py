"""The searcher port: what a problem is, and how searchers are found by name."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from skipsearch import searchers
from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.errors import SearchError
from skipsearch.searchers import (
    ENTRY_POINT_GROUP,
    SEARCHERS,
    Evidence,
    SearchProblem,
    make_searcher,
    searcher_names,
)
from skipsearch.searchers.middle import Middle
from skipsearch.searchers.random import Random


def test_units_are_the_free_sublayers_in_running_order() -> None:
    problem = SearchProblem(n_layers=2, never_skip=frozenset({1}))
    assert problem.units == ((0,), (2,), (3,))
    assert problem.mask_of([0, 2]) == SkipMask(2, attn=(0,), mlp=(1,))
    assert problem.units_of(SkipMask(2, attn=(0,), mlp=(1,))) == {0, 2}


def test_units_of_a_whole_layer_search_are_the_layers_that_are_free_altogether() -> None:
    problem = SearchProblem(n_layers=3, never_skip=frozenset({3}), whole_layers=True)
    assert problem.units == ((0, 1), (4, 5))
    assert problem.mask_of([1]) == SkipMask(3, attn=(2,), mlp=(2,))


@pytest.mark.parametrize(
    "mask", [SkipMask(3, attn=(1,)), SkipMask(3, attn=(0,)), SkipMask(3, mlp=(2,))]
)
def test_a_mask_outside_the_search_space_has_no_units(mask: SkipMask) -> None:
    assert SearchProblem(3, never_skip=frozenset({3}), whole_layers=True).units_of(mask) is None


def test_a_mask_of_another_model_is_refused() -> None:
    with pytest.raises(SearchError, match="12 layers was told to a search over 16"):
        SearchProblem(16).units_of(SkipMask(12))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"never_skip": frozenset({8})}, "names sub-layer 8, outside 0..7"),
        ({"never_skip": frozenset(range(8))}, "leaves nothing to skip"),
        ({"never_skip": frozenset({0, 2, 4, 6}), "whole_layers": True}, "leaves nothing to skip"),
        ({"seed": -1}, "seed is -1"),
        ({"evidence": Evidence(cosines=(0.9,) * 7)}, "cosines has 7 values for 8 sub-layers"),
        ({"evidence": Evidence(costs=Costs((1.0,) * 8, 1.0, (9.0,)))}, "verify has 1 passes"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused_in_one_sentence(
    arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SearchError, match=sentence):
        SearchProblem(4, **arguments)


def test_missing_evidence_is_named_when_the_searcher_is_made() -> None:
    refusals = dict[str, str]()
    for name in SEARCHERS:
        try:
            make_searcher(name, SearchProblem(4))
        except SearchError as error:
            refusals[name] = str(error)
    assert refusals.keys() >= {"sensitivity", "knapsack", "asd", "clasp"}
    for name, sentence in refusals.items():
        assert re.search(rf"'{name}' needs evidence\.\w+", sentence)


def test_an_unknown_searcher_gets_the_nearest_name() -> None:
    with pytest.raises(SearchError, match=r"no searcher called 'midle'; did you mean middle\?"):
        make_searcher("midle", SearchProblem(4))


def installed(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """As if a package with this entry point were installed."""
    points = EntryPoints([EntryPoint(name, value, ENTRY_POINT_GROUP)])
    monkeypatch.setattr(searchers, "entry_points", lambda group: points.select(group=group))


def test_third_parties_add_a_searcher_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "theirs", "skipsearch.searchers.random:Random")
    assert "theirs" in searcher_names()
    assert isinstance(make_searcher("theirs", SearchProblem(4)), Random)


def test_third_parties_cannot_take_one_of_our_names(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "middle", "skipsearch.searchers.random:Random")
    assert isinstance(make_searcher("middle", SearchProblem(4)), Middle)


@pytest.mark.parametrize("value", ["no_such_package:X", "skipsearch.searchers.random:NoSuchClass"])
def test_a_third_party_searcher_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    installed(monkeypatch, "theirs", value)
    with pytest.raises(SearchError, match=rf"'theirs' \({value}\) cannot be imported"):
        make_searcher("theirs", SearchProblem(4))
