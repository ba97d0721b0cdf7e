"""Compile the C++ engine for every processor of this machine's architecture.

A wheel for this system that is built afterwards brings the libraries, so that it needs no compiler
where it is installed:

    python tools/ship_kernels.py
    python -m build --wheel -C--build-option=--plat-name=manylinux_2_28_x86_64
"""

import sys
from pathlib import Path

# The package next to this folder, and not one that is installed: the wheel is built from it.
sys.path.insert(0, str(Path(__file__).parents[1]))

from skipsearch.engine.native.build import SHIPPED, ship_libraries

for path in ship_libraries(progress=lambda name: print(f"compiling for {name}", flush=True)):
    print(f"{path.relative_to(SHIPPED.parent)}: {path.stat().st_size / 1e6:.2f} MB")
