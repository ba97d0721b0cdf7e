"""Torch's threads sleep soon when they have nothing to do, or they take the cores from those of the engine native."""

import os
import subprocess
import sys

import pytest

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(("program", "before", "policy", "spins"), [
    ("import skipsearch", {}, "PASSIVE", "10000"),
    ("import skipsearch", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", "None"),
    ("import skipsearch", {"GOMP_SPINCOUNT": "7"}, "PASSIVE", "7"),
    ("import sys; sys.modules['torch'] = None; import skipsearch", {}, "None", "None"),   # too late: OpenMP has read it
])
def test_importing_skipsearch_before_torch_lets_its_threads_sleep(program: str, before: dict[str, str], policy: str, spins: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | before
    said = subprocess.run([sys.executable, "-c", f"{program}; import os; print(*map(os.environ.get, {NAMES}))"], env=environment,
                          capture_output=True, text=True, check=True).stdout
    assert said.split() == [policy, spins]
