"""The kernels for ARM, cross-compiled and run in an emulator.

apt install g++-aarch64-linux-gnu qemu-user-static
pytest -m slow tests/engine/test_native_arm.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from skipsearch.engine.native import build
from skipsearch.engine.native.block_formats import BLOCK_FORMATS

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
needs_tools = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR}",
)
INT8, INT16, FLOAT = range(3)
N_KINDS = len(BLOCK_FORMATS)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The libraries for both instruction sets of ARM."""
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        for name in ("plain", "neon"):
            (folder / f"{name}.so").write_bytes(build.compile_library(name))
    return {name: folder / f"{name}.so" for name in ("plain", "neon")}


def multiply(library: Path) -> dict[tuple[int, int], np.ndarray]:
    """Return the products of random matrices by (kind of panel, activations)."""
    driver = library.parent / "driver"
    source = Path(__file__).with_name("arm_driver.cpp")
    include = ["-std=c++20", f"-I{build.SOURCES}"]
    subprocess.run([COMPILER, *include, str(source), "-o", str(driver), "-ldl"], check=True)
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(driver), str(library)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    products = {}
    for line in printed.splitlines():
        kind, activations, *values = line.split()
        products[int(kind), int(activations)] = np.array([float.fromhex(v) for v in values])
    assert len(products) == 3 * N_KINDS
    return products


@needs_tools
@pytest.mark.slow
def test_dot_product_instructions_give_the_bits_of_plain_code(
    libraries: Mapping[str, Path],
) -> None:
    plain, neon = multiply(libraries["plain"]), multiply(libraries["neon"])
    for key, products in plain.items():
        assert np.array_equal(products, neon[key]), key


@needs_tools
@pytest.mark.slow
def test_rounded_inputs_give_nearly_the_product_of_unrounded_ones(
    libraries: Mapping[str, Path],
) -> None:
    products = multiply(libraries["neon"])
    for kind in range(1, 1 + N_KINDS):
        exact, size = products[kind, FLOAT], np.abs(products[kind, FLOAT]).max()
        assert 0 < np.abs(products[kind, INT16] - exact).max() < 1e-3 * size, kind
        assert 0 < np.abs(products[kind, INT8] - exact).max() < 5e-2 * size, kind


@needs_tools
@pytest.mark.slow
def test_the_library_uses_the_dot_product_instruction(libraries: Mapping[str, Path]) -> None:
    counts = {}
    for name, library in libraries.items():
        command = ["aarch64-linux-gnu-objdump", "-d", str(library)]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        counts[name] = len(re.findall(r"\bsdot\b", code))
    assert counts["plain"] == 0 < counts["neon"]
