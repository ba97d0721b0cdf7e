"""Which parameters of a test wait for `make thorough`, which CI runs too, and which only run by
hand with `make slow`.

`make test` tries the unmodified modules, native code and one of each kind; what repeats that with
another engine, model or seed waits."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet

NATIVE = pytest.mark.xdist_group("native")  # one process, which builds the engine once


def thorough(*values: Any) -> list[ParameterSet]:
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def slow(*values: Any) -> list[ParameterSet]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


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
