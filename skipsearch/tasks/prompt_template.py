"""Templates: text with `{column}` or `{column[key]}` in it, as in `str.format`, and nothing that
could run code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

PLACEHOLDER = re.compile(r"(\w+)((?:\[\w+\])*)")


def list_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, in order, each once.

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


def fill_template(template: str, columns: Mapping[str, Any]) -> str:
    """The template with its placeholders filled. Text and numbers only: a list or nothing at all is
    a mistake in the data.

    Raises: ValueError naming the placeholder that has no text.
    """
    parts = []
    for literal, field, _, _ in Formatter().parse(template):
        parts.append(literal)
        if field is not None:
            parts.append(_placeholder_text(field, columns))
    return "".join(parts)


def _placeholder_text(field: str, columns: Mapping[str, Any]) -> str:
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
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{field} is {found}; the template needs text there")
    return str(value)
