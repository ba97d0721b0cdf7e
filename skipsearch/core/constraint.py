"""`Constraint`: the shape that an answer must have."""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from skipsearch.core.schema_types import FrozenModel, broken_rule, is_none

# A larger text is refused before a library reads it. The largest schemas of JSONSchemaBench
# (Geng et al. 2025) have about 100,000 characters.
MAX_CONSTRAINT_CHARACTERS = 200_000
MAX_SCHEMA_DEPTH = 64  # nested lists and objects
# One way to write white space: as Python's json.dumps does, which models have seen most. The names
# are those of llguidance's options.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


KINDS = ("json_schema", "regex", "grammar")


class Constraint(FrozenModel):
    """The shape that an answer must have: a JSON schema, a regular expression, or a grammar.

    Exactly one field is set. `Constraint(json_schema={})` allows any JSON value.

    JSON has one space after each comma and each colon and no other white space, so that a schema
    leaves little choice. A schema with `"x-guidance": {"whitespace_flexible": true}` allows any
    white space. An object has only the properties that its schema names, unless the schema says
    `"additionalProperties": true` (`close_objects`).
    """

    model_config = ConfigDict(protected_namespaces=())

    json_schema: dict[str, Any] | None = Field(
        default=None, exclude_if=is_none, description="a JSON schema; {} allows any JSON value"
    )
    regex: str | None = Field(
        default=None,
        exclude_if=is_none,
        description="a regular expression, which the whole answer matches",
    )
    grammar: str | None = Field(
        default=None,
        exclude_if=is_none,
        description="a context-free grammar, in the form of Lark or of llama.cpp (GBNF)",
    )

    @field_validator("json_schema")
    @classmethod
    def _check_depth(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if _depth(schema) > MAX_SCHEMA_DEPTH:
            raise ValueError(f"it nests more than {MAX_SCHEMA_DEPTH} lists and objects")
        return schema

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            names = "json_schema, regex and grammar"
            raise broken_rule("constraint", f"exactly one of {names} is given, and not {given}")
        if len(self.text) > MAX_CONSTRAINT_CHARACTERS:
            raise broken_rule(
                given[0],
                f"it has {len(self.text):,} characters; at most {MAX_CONSTRAINT_CHARACTERS:,} are "
                "read",
            )
        return self

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The schema as JSON text, the regular expression or the grammar."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)

    def __hash__(self) -> int:
        return hash((self.kind, self.text))

    def __str__(self) -> str:
        """Return the kind of constraint, in words."""
        return {
            "json_schema": "JSON of a schema",
            "regex": "a regular expression",
            "grammar": "a grammar",
        }[self.kind]


class ConstraintAfterThinking(Constraint):
    """The shape of the answer of a model that thinks first.

    The text is the thinking, the mark of its end, at most four white spaces, `between`, `head` and
    the answer. A text without thinking is `head` and the answer.
    """

    begin: str | None = None  # the mark that begins the thinking; without it the answer is at once
    # None: the text begins inside the thinking.
    end: str
    between: str = ""
    head: str = ""

    __hash__ = Constraint.__hash__


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested, without recursion: a file may nest millions."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            break
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
