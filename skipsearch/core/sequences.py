"""Comparison of sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens in which both sequences agree."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
