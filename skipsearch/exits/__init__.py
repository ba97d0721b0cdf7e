"""Exit policies by name. To add one: a file in this folder and a line here."""

from __future__ import annotations

from typing import Any

from skipsearch.errors import DecodeError
from skipsearch.exits.base import ExitPolicy
from skipsearch.exits.policy import DraftPolicy
from skipsearch.names import resolve

EXITS: dict[str, str] = {
    "fixed": "skipsearch.exits.fixed:Fixed",
    "confidence": "skipsearch.exits.confidence:Confidence",
    "adaptive": "skipsearch.exits.adaptive:Adaptive",
}


def make_exit(kind: str, **parameters: Any) -> ExitPolicy:
    """A fresh policy. Raises: DecodeError for an unknown kind or a senseless parameter."""
    policy: ExitPolicy = resolve("exit policy", kind, EXITS, DecodeError)(**parameters)
    return policy


__all__ = ["EXITS", "DraftPolicy", "ExitPolicy", "make_exit"]
