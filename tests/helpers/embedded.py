"""The embedded model, loaded once a process for all tests that only read it."""

from __future__ import annotations

from copy import copy
from functools import cache

from skipsearch.engine import load_model
from skipsearch.models import ModelAdapter


def embedded_model() -> ModelAdapter:
    """Return a new adapter of the same float32 weights in the engine lean."""
    return copy(_load())


@cache
def _load() -> ModelAdapter:
    return load_model("demo", "cpu", "float32", engine="lean")
