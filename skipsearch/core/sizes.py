"""Amounts of memory and speeds, as text."""

from __future__ import annotations

import re

_UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str, whole: int | None = None) -> int:
    """Return the bytes of `200MB`, `2GB`, `1.5GiB` or `0`; of `10%` if there is a whole.

    Raises: ValueError.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|MB|GB|MiB|GiB)?", text.strip())
    if match is not None:
        number, unit = float(match[1]), match[2]
        if unit in _UNITS:
            return int(number * _UNITS[unit])
        if unit == "%" and whole is not None:
            return int(number * whole / 100)
        if unit is None and not number:
            return 0
    examples = "200MB, 2GB or 0" if whole is None else "10%, 200MB or 2GB"
    raise ValueError(f"{text!r} is no amount of memory: write {examples}")


def format_tokens_per_s(value: float) -> str:
    """Return a speed in tokens a second, below 100 with a decimal: there a half is 1 % or more."""
    return f"{value:.{1 if value < 100 else 0}f}"
