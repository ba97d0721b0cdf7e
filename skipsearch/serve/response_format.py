"""The field `response_format`: the shape of an answer."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from skipsearch.core.constraint import Constraint
from skipsearch.serve.api_errors import APIError


def read_response_format(value: Any) -> Constraint | None:
    """Return the constraint of a `response_format`; None for `text`.

    The types are OpenAI's `text`, `json_object` and `json_schema`, and also `regex` and `grammar`,
    each with its text in a field of the same name. A `schema` next to the type, as in llama.cpp, is
    followed, too.

    Raises: APIError 400.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    try:
        if kind in ("json_object", "json_schema") and value.get("schema") is not None:
            if isinstance(value["schema"], dict):
                return Constraint(json_schema=value["schema"])
            raise APIError(
                400,
                f"the schema of response_format is {json.dumps(value['schema'])[:80]}; it is a "
                "JSON schema, an object",
                "response_format",
            )
        if kind == "json_object":
            return Constraint(json_schema={"type": "object"})
        if kind == "json_schema":
            described = value.get("json_schema")
            if isinstance(described, dict) and isinstance(described.get("schema"), dict):
                return Constraint(json_schema=described["schema"])
            raise APIError(
                400,
                'response_format is a json_schema without {"json_schema": {"schema": {…}}}',
                "response_format",
            )
        if kind in ("regex", "grammar") and isinstance(value.get(kind), str):
            return Constraint(**{kind: value[kind]})
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise APIError(
            400, f"response_format cannot be used: {reason}", "response_format"
        ) from None
    raise APIError(
        400,
        f"response_format is {json.dumps(value)[:80]}; its type is text, json_object, json_schema, "
        "or regex or grammar with a text in that field",
        "response_format",
    )
