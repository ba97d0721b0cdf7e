"""Which parameters of a test wait for `make thorough`, and which for `make slow`, by hand.

`make test` tries the engine lean or native code, and one of each kind; what repeats that
with another engine, model, seed or pair of settings waits. CI runs `make thorough` for losslessness
alone, and for searches that processes share (`.ci/run`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

NATIVE = pytest.mark.xdist_group("native")  # one process, which builds the engine once


def thorough(*values: Any) -> list[ParameterSet]:
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def slow(*values: Any) -> list[ParameterSet]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[ParameterSet]:
    """All pairs; `make test` tries each of `values` with one of `others`, which take turns."""
    return [
        pytest.param(
            value,
            other,
            id=f"{value}-{other}",
            marks=[] if i % len(others) == j else [pytest.mark.thorough],
        )
        for i, value in enumerate(values)
        for j, other in enumerate(others)
    ]


def engine_params(
    *quick: str, thorough: tuple[str, ...] = (), slow: tuple[str, ...] = ()
) -> list[ParameterSet]:
    """Engines as parameters; each of native code in the process that builds it."""
    marks = {
        **dict.fromkeys(quick, ()),
        **dict.fromkeys(thorough, (pytest.mark.thorough,)),
        **dict.fromkeys(slow, (pytest.mark.slow,)),
    }
    return [
        pytest.param(name, marks=[*mark, *([NATIVE] if name.startswith("native") else [])])
        for name, mark in marks.items()
    ]
