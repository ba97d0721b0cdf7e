"""Templates: text with `{column}` or `{column[key]}`, as in `str.format`, without anything that
could run code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any

from pydantic import AfterValidator, Field

PLACEHOLDER = re.compile(r"(\w+)((?:\[\w+\])*)")


def list_columns(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, in order, each once.

    Raises: ValueError with the rule that the template breaks.
    """
    names: dict[str, None] = {}
    for _, field, spec, conversion in Formatter().parse(template):
        if field is None:
            continue
        match = PLACEHOLDER.fullmatch(field)
        if not match or spec or conversion:
            written = (
                "{"
                + field
                + (f"!{conversion}" if conversion else "")
                + (f":{spec}" if spec else "")
                + "}"
            )
            raise ValueError(
                f"{written} is not a placeholder; write {{column}} or {{column[key]}}, and {{{{ "
                "for a brace"
            )
        names[match[1]] = None
    return tuple(names)


def _check_template(template: str) -> str:
    list_columns(template)
    return template


Text = Annotated[str, Field(min_length=1)]
Template = Annotated[Text, AfterValidator(_check_template)]


def fill_template(template: str, columns: Mapping[str, Any]) -> str:
    """Return the template with its placeholders filled.

    Values are text and numbers only: a list or a missing value is an error in the data.

    Raises: ValueError that names the placeholder without text.
    """
    parts = []
    for literal, field, _, _ in Formatter().parse(template):
        parts.append(literal)
        if field is not None:
            parts.append(_placeholder_text(field, columns))
    return "".join(parts)


def _placeholder_text(field: str, columns: Mapping[str, Any]) -> str:
    """Return the text of one placeholder. Raises: ValueError."""
    match = PLACEHOLDER.fullmatch(field)
    if not match:
        raise ValueError(f"{{{field}}} is not a placeholder; write {{column}} or {{column[key]}}")
    value: Any = columns.get(match[1])
    for key in re.findall(r"\[(\w+)\]", match[2]):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problem = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{field} is {problem}; the template needs text there")
    return str(value)
