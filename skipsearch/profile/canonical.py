"""The canonical text of a profile."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from skipsearch.core.strict_yaml import is_plain_text
from skipsearch.profile.schema import Profile

_PLAIN_SCALAR = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _./+()-]*")
_RECIPE_KEYS = ("drafters", "lost")  # each drafter on a line of its own
_TRAILING_KEYS = ("draft_length", "exit", "vocabulary")  # the longest is last


def dump_profile(profile: Profile) -> str:
    """Return YAML with fixed key order, alignment and quoting.

    Equal profiles give equal bytes, and a changed value changes one line.
    """
    lines: list[str] = []
    for key, value in to_plain_data(profile).items():
        if key in _RECIPE_KEYS and value:
            lines += [f"{key}:", *(f"  - {to_flow_yaml(drafter)}" for drafter in value)]
        elif key == "measured" and value is not None:
            lines.append("measured:")
            lines += [
                f"  {_format_entry(name, part, 22 if _is_interval(part) else 0)}"
                for name, part in value.items()
            ]
        else:
            lines.append(_format_entry(key, value, 11))
    return "\n".join(lines) + "\n"


def to_plain_data(profile: Profile) -> dict[str, Any]:
    """Return the profile as plain data in the order of its keys, as `--json` prints it."""
    data = profile.model_dump(mode="json")
    return data | {
        key: [_order_drafter_keys(drafter) for drafter in data[key]] for key in _RECIPE_KEYS
    }


def _order_drafter_keys(drafter: dict[str, Any]) -> dict[str, Any]:
    """Put `_TRAILING_KEYS` last; the other keys keep their order."""
    return {
        key: drafter[key]
        for key in sorted(
            drafter, key=lambda key: _TRAILING_KEYS.index(key) if key in _TRAILING_KEYS else -1
        )
    }


def _is_interval(value: Any) -> bool:
    return isinstance(value, dict) and "ci95" in value


def _format_entry(key: str, value: Any, width: int) -> str:
    return f"{key + ':':<{width}} {to_flow_yaml(value)}"


def to_flow_yaml(value: Any) -> str:
    """Return plain data in YAML's flow style, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {to_flow_yaml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_flow_yaml, value)) + "]"
    if isinstance(value, str):
        return (
            value
            if _PLAIN_SCALAR.fullmatch(value) and _is_text_in_yaml_1_1(value)
            else json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, float):
        digits = repr(value)  # YAML 1.1 needs a point: 1.0e-05
        return digits.replace("e", ".0e") if "e" in digits and "." not in digits else digits
    return json.dumps(value)


def _is_text_in_yaml_1_1(text: str) -> bool:
    """Return whether YAML 1.1 also reads this plain scalar as text; False for `yes` and `012`."""
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(text[0], [])
    return is_plain_text(text) and not any(pattern.match(text) for _, pattern in resolvers)
