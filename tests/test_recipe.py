"""What is stored of a recipe loads again as the same recipe, whatever its drafters and exit
policies are set to.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import yaml
from helpers.properties import with_examples
from helpers.specs import specs
from hypothesis import given

from skipsearch.core.recipe import DRAFTERS, EXITS, Recipe, make_exit
from skipsearch.profile.canonical import to_flow_yaml


@pytest.mark.parametrize("kind", DRAFTERS)
def test_any_drafter_loads_again_from_yaml_and_from_json(kind: str) -> None:
    seen = defaultdict[str, set[str]](set)

    @with_examples(30)
    @given(specs(DRAFTERS, kind))
    def check(drafter: Any) -> None:
        for field in type(drafter).model_fields:
            seen[field].add(repr(getattr(drafter, field)))
        recipe = Recipe((drafter,))
        data = recipe.as_data()
        assert Recipe.from_data(yaml.safe_load(to_flow_yaml(data))) == recipe
        assert Recipe.from_data(json.loads(json.dumps(data))) == recipe

    check()
    assert [field for field, values in seen.items() if len(values) == 1] == ["kind"], (
        "a field that was never varied"
    )


@pytest.mark.parametrize("kind", EXITS)
def test_any_exit_policy_loads_again_from_yaml(kind: str) -> None:
    @with_examples(60)
    @given(specs(EXITS, kind))
    def check(exit_policy: Any) -> None:
        assert (
            make_exit(**yaml.safe_load(to_flow_yaml(exit_policy.model_dump(mode="json"))))
            == exit_policy
        )

    check()
