"""The commands let idle threads of torch sleep, which otherwise take the cores from the engine
native. `import skipsearch` does not.
"""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from helpers.threads import one_thread

from skipsearch.engine.native.repack import warn_if_threads_spin
from skipsearch.errors import SpinningThreads

__all__ = ["one_thread"]
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
COMMAND = "import skipsearch.cli.main as m; m.let_idle_threads_sleep()"


@pytest.mark.parametrize(
    ("program", "before", "policy", "spins"),
    [
        (
            "import skipsearch; skipsearch.Decoder",
            {},
            "None",
            "None",
        ),  # what a library decides is for its own process alone
        (COMMAND, {}, "PASSIVE", "10000"),
        (COMMAND, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", "None"),
        (COMMAND, {"OMP_WAIT_POLICY": "passive"}, "passive", "10000"),  # or llama.cpp crawls
        (COMMAND, {"GOMP_SPINCOUNT": "7"}, "PASSIVE", "7"),
        (
            f"import sys; sys.modules['torch'] = None; {COMMAND}",
            {},
            "None",
            "None",
        ),  # too late: OpenMP has read it
    ],
)
def test_the_commands_let_idle_threads_sleep_and_the_library_leaves_the_environment(
    program: str, before: dict[str, str], policy: str, spins: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | before
    said = subprocess.run(
        [sys.executable, "-c", f"{program}; import os; print(*map(os.environ.get, {NAMES}))"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.split() == [policy, spins]


def test_a_command_sets_the_variables_before_torch_is_imported() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    program = (
        "import sys; from skipsearch.cli import main; assert 'torch' not in sys.modules; sys.argv "
        "= ['skipsearch', '--version']\n"
        "try: main.main()\nexcept SystemExit: pass\nimport os; print(os.environ['OMP_WAIT_POLICY'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.split()[-1] == "PASSIVE"


@pytest.mark.parametrize(
    ("threads", "policy", "warned"),
    [(2, None, True), (2, "PASSIVE", False), (2, "ACTIVE", False), (1, None, False)],
)
def test_native_warns_where_idle_threads_would_slow_it_down(
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
    threads: int,
    policy: str | None,
    warned: bool,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_if_threads_spin()
    assert [warning.category for warning in said] == ([SpinningThreads] if warned else [])
