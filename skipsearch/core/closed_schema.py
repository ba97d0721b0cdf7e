"""JSON schemas whose objects have only the properties that they name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

# Keywords whose value is a schema or a list of schemas, and keywords whose value names schemas.
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains")
_CHOICES = ("anyOf", "oneOf")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
# Keywords that apply several schemas to one object: closing one of them would rule out what
# another one asks for.
_COMBINING = {
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "dependencies",
    "dependentSchemas",
    "dependentRequired",
    "extends",
    "$dynamicRef",
    "$recursiveRef",
}
# Keywords of objects. Next to a choice or a reference they combine as well.
_OBJECT = {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}
# Keywords that say themselves what other properties an object may have.
_OPEN = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "minProperties",
}


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that adds `additionalProperties: false` where nothing else is said.

    JSON Schema lets an object have any property besides those it names. A model that may write
    another one tends to continue with invented ones until its limit. llama.cpp and XGrammar close
    such objects too, and OpenAI's strict mode requires it. `additionalProperties: true` keeps one
    open.

    Whatever the result allows, `schema` allows. A schema that combines objects (`allOf`, `not`,
    `if`, properties next to `$ref` or `anyOf`, `oneOf` without a discriminator) is returned as
    it is.
    """
    closed = copy.deepcopy(dict(schema))
    parts = list(_schemas(closed))
    if any(map(_combines, parts)):
        return dict(schema)
    for part in parts:
        if _names_all_properties(part):
            part["additionalProperties"] = False
    return closed


def _names_all_properties(schema: dict[str, Any]) -> bool:
    """Return whether a schema names all properties that it requires, and is silent on others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not (isinstance(properties, dict) and properties and isinstance(required, list)):
        return False
    return not schema.keys() & _OPEN and all(name in properties for name in map(str, required))


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it; values of `enum`, `const` and `default` are data."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in (*_SCHEMAS, *_CHOICES):
        value = schema.get(keyword)
        for part in value if isinstance(value, list) else [value]:
            yield from _schemas(part)
    for keyword in _NAMED_SCHEMAS:
        if isinstance(named := schema.get(keyword), dict):
            for part in named.values():
                yield from _schemas(part)


def _combines(schema: dict[str, Any]) -> bool:
    """Return whether a schema applies several schemas to one value."""
    if schema.keys() & _COMBINING or ("oneOf" in schema and "discriminator" not in schema):
        return True
    return bool(schema.keys() & {"$ref", *_CHOICES} and schema.keys() & _OBJECT)
