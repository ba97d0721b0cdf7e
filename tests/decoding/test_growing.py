"""Caches that grow with their text, shrink when a request ends, and are always returned."""

from __future__ import annotations

import pytest
from helpers.marks import engine_params, thorough
from helpers.tiny import use_engine

from .batch_checks import trained
from .checks import assert_partly_accepted
from .growing_checks import (
    check_growing_batches,
    check_growing_caches,
    check_growing_recurrent_caches,
    check_growing_sessions,
    check_leaving_rows,
    small_caches,
)
from .prefix_checks import check_prefixes

__all__ = ["assert_partly_accepted", "check_prefixes", "small_caches", "thorough", "trained"]


@pytest.mark.parametrize(
    "engine", engine_params("graph", "native", thorough=("lean", "native-8bit-float-activations"))
)
@pytest.mark.parametrize(
    "check",
    [check_growing_caches, check_growing_sessions, check_growing_batches, check_leaving_rows],
)
def test_tokens_are_the_same_on_every_engine(check, engine: str) -> None:
    with use_engine(engine):
        check()


@pytest.mark.thorough
def test_recurrent_states_stay_where_their_text_is() -> None:
    check_growing_recurrent_caches()
