"""The architecture as rules on imports: which package may import which, and what reading a profile
must not load.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skipsearch

PACKAGE = Path(skipsearch.__file__).parent

# The order of dependence: a package imports only packages above it. docs/how-it-works.md and
# CONTRIBUTING.md show the same order.
LAYERS = (
    "errors",
    "core",
    "constraints",
    "tasks",
    "models",
    "engine",
    "drafters",
    "searchers",
    "profile",
    "decoding",
    "integrations",
    "replay",
    "timing",
    "tuning",
    "training",
    "serve",
    "bench",
    "report",
    "export",
    "cli",
    "__main__",
    "demo",
)
# A package that may import less than the order allows.
NARROW = {
    "searchers": {
        "core",
        "drafters.asd.rule",
        "drafters.clasp.dynamic_program",
    },  # searchers never see a model
    "profile": {"core", "drafters.trained.module_files"},  # reading a profile loads no torch
    "tasks": {"core"},
}
# Ports that the types of `core.recipe` name under TYPE_CHECKING.
PORTS = {("core", "drafters.base"), ("core", "models.adapter")}
NO_TORCH = ("core", "profile", "drafters/exits")  # folders whose modules load no torch at import
PLUGIN = re.compile(
    r"skipsearch(\.\w+)+:\w+"
)  # an entry of a registry: loaded by name when somebody asks for it


def imports_of(source: str, path: str) -> Iterator[str]:
    """Yield the full name of every module that a file imports, in functions and under TYPE_CHECKING
    too.

    path: of the file, relative to the package, for relative imports.
    """
    here = ["skipsearch", *Path(path).with_suffix("").parts]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*here[: len(here) - node.level], *filter(None, [node.module])])
                if node.level
                else str(node.module)
            )
            yield from (f"{base}.{alias.name}" for alias in node.names)


def broken_rules(source: str, path: str) -> list[str]:
    """Return a line for each import of a file that its package may not have."""
    package = Path(path).with_suffix("").parts[0]
    if package not in LAYERS:
        return [f"{path}: the package {package!r} has no place in LAYERS"]
    broken = []
    for module in imports_of(source, path):
        top, *inside = module.split(".")
        if (
            top in {"torch", "transformers"}
            and package in NO_TORCH
            and not loads_lazily(source, top)
        ):
            broken.append(f"{path}: {package} must not load {top}")
        if top != "skipsearch" or not inside:
            continue
        if inside[0] in skipsearch._MODULE_OF:  # `from skipsearch import Decoder`
            inside = skipsearch._MODULE_OF[inside[0]].split(".")[1:]
        if inside[0] in {package, "errors", "__version__"} or any(
            (package, port) in PORTS for port in (".".join(inside[:2]),)
        ):
            continue
        if inside[0] not in LAYERS[: LAYERS.index(package)]:
            broken.append(f"{path}: {package} must not import {'.'.join(inside)}")
        elif package in NARROW and not any(
            inside[: len(allowed)] == allowed for allowed in (a.split(".") for a in NARROW[package])
        ):
            broken.append(
                f"{path}: {package} may import {', '.join(sorted(NARROW[package]))} alone, and not "
                f"{'.'.join(inside)}"
            )
    return broken


def loads_lazily(source: str, module: str) -> bool:
    """Return whether a file imports `module` in functions or under TYPE_CHECKING alone."""
    top_level = [
        node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [
        alias.name for node in top_level if isinstance(node, ast.Import) for alias in node.names
    ]
    names += [str(node.module) for node in top_level if isinstance(node, ast.ImportFrom)]
    return not any(name.split(".")[0] == module for name in names)


def package_files() -> list[str]:
    return sorted(
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "__init__.py"
    )


def read(path: str) -> str:
    return (PACKAGE / path).read_text("utf-8")


def test_no_package_imports_one_below_it() -> None:
    assert not [rule for path in package_files() for rule in broken_rules(read(path), path)]


def test_no_module_imports_itself_through_others() -> None:
    modules = {
        "skipsearch." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in package_files()
    }
    waiting = {
        name: {
            module
            for full in imports_of(read(path), path)
            for module in (full, full.rpartition(".")[0])
            if module in modules
            and module != name
            and modules[module].count("__init__") == 0
            and not _is_own_session(name, module)
        }
        for name, path in modules.items()
    }
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert not waiting, f"these modules import each other: {sorted(waiting)}"


def _is_own_session(module: str, imported: str) -> bool:
    """Return whether the settings of a drafter import its session, which `build` does when it is
    called.
    """
    folder, _, name = module.rpartition(".")
    return name == "spec" and imported == f"{folder}.session"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/x.py", "from skipsearch.decoding import Decoder"),
        ("models/x.py", "import skipsearch.engine.forward"),
        ("searchers/x.py", "def ask():\n    from skipsearch.models.adapter import ModelAdapter"),
        (
            "searchers/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from "
            "skipsearch.timing.interleaved import Timings",
        ),
        ("searchers/x.py", "from ..replay import sweep"),
        ("drafters/x.py", "from skipsearch import tune"),
        ("replay/x.py", "from skipsearch.tuning import driver"),
        ("core/x.py", "from skipsearch.searchers import gp"),
        ("profile/x.py", "import torch.nn"),
        ("core/x.py", "from torch import Tensor"),
        ("attic/x.py", "import os"),
    ],
    ids=lambda text: str(text).rpartition("\n")[2],
)
def test_an_import_against_the_order_is_reported(path: str, source: str) -> None:
    assert len(broken_rules(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("decoding/x.py", "from skipsearch.models.adapter import ModelAdapter"),
        (
            "decoding/x.py",
            "from skipsearch.decoding.decoder import Chunk\nfrom .request import Request\nimport "
            "torch",
        ),
        ("searchers/x.py", "from skipsearch import SkipMask, __version__\nimport botorch"),
        ("core/x.py", "def describe():\n    import torch"),
        ("cli/x.py", "from skipsearch.tuning.driver import tune"),
    ],
)
def test_an_import_along_the_order_is_accepted(path: str, source: str) -> None:
    assert broken_rules(source, path) == []


def test_the_exported_names_are_these_and_each_can_be_loaded() -> None:
    assert sorted(skipsearch.__all__) == [
        "Chunk",
        "Constraint",
        "DecodeError",
        "DecodeStats",
        "Decoder",
        "ExportError",
        "Generation",
        "MaskError",
        "ModelAdapter",
        "ModelError",
        "ModelSpec",
        "Profile",
        "ProfileError",
        "Recipe",
        "Request",
        "SearchError",
        "Session",
        "SkipMask",
        "SkipSearchError",
        "Task",
        "TaskError",
        "Trial",
        "UnsupportedRequest",
        "__version__",
        "adapt",
        "attach",
        "detach",
        "generate",
        "load_decoder",
        "load_model",
        "load_profile",
        "load_task",
        "save_profile",
        "tune",
    ]
    for name in skipsearch.__all__:
        assert getattr(skipsearch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'decoder'"):
        skipsearch.decoder  # noqa: B018


def run_python(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return ran.stdout.strip()


def test_reading_a_profile_does_not_load_torch() -> None:
    profile = Path(__file__).parent / "profile" / "golden" / "v3_speculate.yaml"
    heavy = "{'torch', 'transformers', 'optuna', 'botorch'} & set(sys.modules)"
    assert (
        run_python(
            f"import sys, skipsearch; skipsearch.load_profile({str(profile)!r}); print({heavy} or "
            "'light')"
        )
        == "light"
    )


def test_importing_the_package_loads_none_of_its_packages() -> None:
    assert (
        run_python(
            "import sys, skipsearch; print([m for m in sys.modules if m.startswith('skipsearch.')])"
        )
        == "[]"
    )
