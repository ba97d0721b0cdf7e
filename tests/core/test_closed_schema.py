"""`close_objects`: objects have the properties that they name, and nothing new is allowed."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipsearch.core.closed_schema import close_objects

POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (POINT, CLOSED),
        ({"type": "array", "items": POINT}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$defs": {"point": POINT}, "$ref": "#/$defs/point"},
            {"$defs": {"point": CLOSED}, "$ref": "#/$defs/point"},
        ),
        (
            {"oneOf": [POINT], "discriminator": {"propertyName": "x"}},
            {"oneOf": [CLOSED], "discriminator": {"propertyName": "x"}},
        ),
        (
            {"properties": {"properties": POINT}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
    ],
    ids=["object", "items", "choice", "reference", "discriminated", "a property named so"],
)
def test_an_object_gets_only_the_properties_that_it_names(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    before = copy.deepcopy(schema)
    assert close_objects(schema) == closed
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**POINT, "additionalProperties": True},
        {**POINT, "additionalProperties": {"type": "string"}},
        {**POINT, "patternProperties": {"^y": {}}},
        {**POINT, "required": ["x", "y"]},
        {**POINT, "minProperties": 2},
        {"allOf": [POINT, {"properties": {"y": {}}}]},
        {"not": POINT},
        {"required": ["y"], "anyOf": [POINT]},
        {**POINT, "$ref": "#/$defs/more", "$defs": {"more": {"properties": {"y": {}}}}},
        {"oneOf": [POINT, {"properties": {"y": {}}}]},
        {"enum": [POINT]},
        {"const": POINT, "default": POINT},
        {"items": True, "properties": None},
        {**POINT, "required": True},
        {**POINT, "required": [{}]},
    ],
)
def test_what_says_more_about_its_properties_stays(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


NAMES = st.sampled_from(["x", "y"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.sampled_from([{}, {"type": "integer"}, {"const": 1}])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner)},
            optional={
                "required": st.lists(NAMES, unique=True),
                "additionalProperties": inner | st.booleans(),
                "minProperties": st.integers(0, 2),
                "allOf": st.lists(inner, min_size=1, max_size=2),
                "not": inner,
            },
        ),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda choices: {"oneOf": choices}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda items: {"type": "array", "items": items}, inner),
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    st.integers(0, 2) | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


@given(SCHEMAS, VALUES)
def test_whatever_the_closed_schema_allows_the_schema_allows(
    schema: dict[str, Any], value: Any
) -> None:
    if jsonschema.Draft202012Validator(close_objects(schema)).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
