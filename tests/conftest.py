"""What holds for every test: nothing of this user's own cache is read or written, tests of a group
run in one process, and pages are opened in one headless browser. Where there is none its tests are
skipped, but not in CI, which installs one."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from skipsearch.core.files import make_private_dir, write_atomically

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two workers share two cores, and threads that wait for one another spin
# Each worker and each process that a test starts would compile the package and the tests again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# While modules and tests are collected, nothing is garbage; later, none of that is looked through
# again, which takes a second each time.
gc.disable()


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """One folder for compiled code and latency tables, for all workers and for the processes that
    tests start.
    """
    mine = tmp_path_factory.getbasetemp()
    folder = (mine if worker_id == "master" else mine.parent) / "cache"
    compiled = _code_of_earlier_runs()
    _copy_code(compiled, folder / "compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPSEARCH_CACHE_DIR", str(folder))
        patch.setenv(
            "SKIPSEARCH_NATIVE", "0"
        )  # or what auto takes would depend on which test built it first
        patch.setenv("XDG_DATA_HOME", str(folder.with_name("data")))
        yield
    _copy_code(folder / "compiled", compiled)


def _code_of_earlier_runs() -> Path:
    """Return the folder with what earlier runs compiled, by the same compiler in the same way.

    The names of the files tell sources and options.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    how = (ROOT / "skipsearch" / "engine" / "native" / "build.py").read_bytes()
    if compiler:
        how += subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    return ROOT / "build" / "compiled" / hashlib.sha256(how).hexdigest()[:16]


def _copy_code(source: Path, target: Path) -> None:
    """Copy the files that the target lacks. Both workers may do so at the same time."""
    make_private_dir(target)
    for path in source.glob("*.code"):
        if not (target / path.name).exists():
            write_atomically(target / path.name, path.read_bytes())


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest-xdist tells the group of a test by a suffix of its id. Where the suffix is lost
    (pytest 9.2 with pytest-xdist 3.8), what the tests of a group share is made once a worker: the
    suite passes, and takes half as long again. Notebooks take longest: one that begins last keeps
    one worker busy and lets the other wait."""
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")
    if on_gpu := [item for item in items if item.get_closest_marker("gpu")]:
        from torch.cuda import is_available

        for item in on_gpu if not is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.getoption("loadgroup", False) and any(
        item.get_closest_marker("xdist_group") and "@" not in item.nodeid for item in items
    ):
        raise pytest.UsageError(
            "pytest-xdist does not keep groups of tests together here: install pytest<9.2, as "
            "pyproject.toml has it"
        )


# A page from disk, and a browser that asks nobody anything.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no chromium, which .ci/run should have installed")
        pytest.skip("needs chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:  # a new, empty profile for each browser
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()
