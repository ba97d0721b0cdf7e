"""The structs and tables of Python are those of the kernels: the compiler compares them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from skipsearch.engine.native import build, layout, structs
from skipsearch.engine.native.block_formats import BLOCK_FORMATS
from skipsearch.engine.native.layout import write_layout_checks


def is_accepted(folder: Path) -> bool:
    """Compile the checks alone."""
    header = folder / "layout.h"
    header.write_text(write_layout_checks())
    compiler = build.find_compiler()
    assert compiler is not None
    command = [compiler, "-std=c++20", f"-I{build.SOURCES}", "-fsyntax-only", "-x", "c++"]
    return subprocess.run([*command, str(header)], capture_output=True).returncode == 0


def swap_fields(patch: pytest.MonkeyPatch) -> None:
    class SamplingStruct(structs.ctypes.Structure):  # two doubles in the other order
        _fields_ = (
            structs.SamplingStruct._fields_[1],
            structs.SamplingStruct._fields_[0],
            *structs.SamplingStruct._fields_[2:],
        )

    patch.setattr(SamplingStruct, "__module__", structs.__name__)


def drop_field(patch: pytest.MonkeyPatch) -> None:
    class Matrix(structs.ctypes.Structure):
        _fields_ = structs.MatrixStruct._fields_[:-1]

    patch.setattr(Matrix, "__module__", structs.__name__)


def change_type(patch: pytest.MonkeyPatch) -> None:
    class Norm(structs.ctypes.Structure):
        weight, _, width = structs.NormStruct._fields_
        _fields_ = (weight, ("eps", structs.c_int64), width)

    patch.setattr(Norm, "__module__", structs.__name__)


def change_format(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(BLOCK_FORMATS, "q4_0", replace(BLOCK_FORMATS["q4_0"], zero=7))


def change_code(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(layout.CODES, "BF16", 2)


def test_the_structs_codes_and_formats_of_python_are_those_of_the_kernels(tmp_path: Path) -> None:
    assert is_accepted(tmp_path)


@pytest.mark.parametrize(
    "change", [swap_fields, drop_field, change_type, change_format, change_code]
)
def test_a_difference_does_not_compile_and_names_another_library(
    change: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build._cache_name("plain")
    change(monkeypatch)
    assert build._cache_name("plain") != before
    assert not is_accepted(tmp_path)
