"""`Constraint`: exactly one shape, within bounds."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from skipsearch.core.constraint import MAX_CONSTRAINT_CHARACTERS, MAX_SCHEMA_DEPTH, Constraint


@pytest.mark.parametrize(
    "given", [{}, {"regex": "a", "grammar": "b"}, {"json_schema": {}, "regex": "a"}], ids=str
)
def test_exactly_one_shape_is_given(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one"):
        Constraint(**given)


def test_a_huge_text_is_refused_before_a_library_reads_it() -> None:
    with pytest.raises(ValidationError, match="characters"):
        Constraint(regex="a" * (MAX_CONSTRAINT_CHARACTERS + 1))


def test_a_schema_may_not_nest_without_end() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = {"items": schema}
    with pytest.raises(ValidationError, match="nests more than"):
        Constraint(json_schema={"items": schema})


def test_equal_constraints_are_equal_and_hash_alike() -> None:
    one, other = (
        Constraint(json_schema={"type": "object"}),
        Constraint(json_schema={"type": "object"}),
    )
    assert one == other
    assert len({one, other, Constraint(regex="a")}) == 2


def test_a_file_has_only_the_field_that_is_set() -> None:
    assert Constraint(regex="a|b").model_dump(mode="json") == {"regex": "a|b"}
