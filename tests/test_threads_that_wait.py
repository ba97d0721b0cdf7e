"""Torch's threads sleep while they have nothing to do, or they take the cores from those of the engine native."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("program", "before", "policy"), [
    ("import skipsearch", {}, "PASSIVE"),
    ("import skipsearch", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
    ("import sys; sys.modules['torch'] = None; import skipsearch", {}, "None"),   # too late: OpenMP has read it
])
def test_importing_skipsearch_before_torch_lets_its_threads_sleep(program: str, before: dict[str, str], policy: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | before
    said = subprocess.run([sys.executable, "-c", f"{program}; import os; print(os.environ.get('OMP_WAIT_POLICY'))"], env=environment,
                          capture_output=True, text=True, check=True).stdout
    assert said.strip() == policy
