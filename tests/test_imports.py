"""The house rules of imports: which room may import which, read from the source, so that no arrow slips in unseen."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skipsearch
from skipsearch.recipe import DRAFTERS, EXITS

PACKAGE = Path(skipsearch.__file__).parent
LONGEST_FILE = 300   # lines; a file that grows past it has two ideas in it

# Room -> what it may import beside itself and BASE. "models" is the whole room, "models.spec" that file alone: a port.
BASE = {"errors", "names", "repeats", "version", "fields", "strict_yaml"}
DECODING = {"drafters", "exits", "recipe", "engine", "modules", "cache", "models", "profile", "machine", "stats", "costs",
            "mask"}   # all of models: `generate` adapts a model in memory
EVALUATION = DECODING | {"decoding", "tasks", "searchers.base"}   # the last for the plain data that searchers are given
ABOVE_SEARCHERS = EVALUATION | {"evaluation", "searchers"}
DRIVER = ABOVE_SEARCHERS | {"storage", "ledger", "compiler", "search", "finals", "tuning"}

SPECS = {entry.removeprefix("skipsearch.").partition(":")[0] for entry in (*DRAFTERS.values(), *EXITS.values())}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "repeats": set(),
    "names": set(),
    "version": set(),
    "fields": set(),
    "strict_yaml": set(),
    "mask": set(),
    "costs": {"mask"},
    "recipe": {"mask", "drafters.base", "models.spec", *SPECS},   # by name alone: its tables, and ports
    "stats": {"mask", "recipe"},
    "profile": {"mask", "stats", "recipe", "modules.files"},   # which loads no torch either
    "tasks": set(),
    "machine": set(),
    "cache": set(),
    "models": {"mask", "cache", "machine"},   # the last for the folder where checks are kept
    "engine": {"models", "cache", "mask", "machine"},
    "modules": {"engine", "models", "cache", "mask", "machine"},
    "exits": {"recipe"},
    "drafters": {"exits", "recipe", "engine", "modules", "cache", "mask", "models.spec", "programme", "admg"},
    "decoding": DECODING,
    "conversation": DECODING | {"decoding"},
    "evaluation": EVALUATION,
    "programme": set(),
    "admg": set(),
    "searchers": {"mask", "stats", "costs", "programme", "admg"},
    "storage": set(),
    "workers": {"storage", "mask", "stats"},
    "ledger": ABOVE_SEARCHERS | {"storage", "workers"},
    "compiler": DRIVER,
    "search": ABOVE_SEARCHERS | {"ledger"},
    "finals": ABOVE_SEARCHERS | {"search"},
    "tuning": DRIVER,
    "verification": DRIVER,
    "export": DRIVER,
    "report": DRIVER,
    "bench": DRIVER,
    "serve": DRIVER,
    "training": DRIVER,
    "demo": {"models"},
    "cli": DRIVER | {"training", "verification", "export", "report", "bench", "conversation", "serve"},
}
NO_TORCH = {"errors", "repeats", "names", "version", "fields", "strict_yaml", "mask", "costs", "recipe", "stats", "profile", "exits"}
LAZY_NAME = re.compile(r"skipsearch(\.\w+)+(:\w+)?")


def modules_named_in(source: str, path: str) -> Iterator[str]:
    """Every module that a file imports, or names for a lazy import, in full; what is taken from a module counts as a part of it.

    Imports under TYPE_CHECKING and inside functions count too. path: relative to the package, for relative imports.
    """
    here = ["skipsearch", *Path(path).with_suffix("").parts]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[:len(here) - node.level], *filter(None, [node.module])]) if node.level else str(node.module)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "skipsearch":
            yield f"skipsearch.{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and LAZY_NAME.fullmatch(node.value):
            yield node.value.partition(":")[0]


def bad_arrows(source: str, path: str) -> list[str]:
    """What a file names and its room may not import."""
    room = Path(path).with_suffix("").parts[0]
    if room not in ALLOWED:
        return [f"{path}: the room {room!r} has no row in the table of this test"]
    found = []
    for module in modules_named_in(source, path):
        parts = module.split(".")
        if parts[0] != "skipsearch":
            if room in NO_TORCH and parts[0] in {"torch", "transformers"}:
                found.append(f"{path}: {room} must not load {parts[0]}")
            continue
        inside = parts[1:]
        if inside and inside[0] in skipsearch._HOME_OF:   # through the front door, which only says where a name lives
            inside = skipsearch._HOME_OF[inside[0]].split(".")[1:]
        if not inside or inside == ["__version__"] or inside[0] == room:
            continue
        if not any(inside[:len(a)] == a for a in (allowed.split(".") for allowed in ALLOWED[room] | BASE)):
            found.append(f"{path}: {room} must not import {'.'.join(inside)}")
    return found


def sources() -> list[str]:
    return sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_no_room_imports_what_stands_above_it() -> None:
    found = [arrow for path in sources() for arrow in bad_arrows((PACKAGE / path).read_text("utf-8"), path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("path", "source"), [
    ("models/x.py", "from skipsearch.decoding import Decoder"),
    ("models/x.py", "import skipsearch.engine.forward"),
    ("models/x.py", "from skipsearch.demo import train"),
    ("searchers/x.py", "def ask():\n    from skipsearch.models.spec import ModelAdapter"),
    ("searchers/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from skipsearch.evaluation.wall import Timings"),
    ("searchers/x.py", "from ..evaluation import latency"),
    ("searchers/x.py", "TABLE = {'x': 'skipsearch.decoding.decoder:DecodeLoop'}"),
    ("drafters/x.py", "from skipsearch.models import load_model"),
    ("drafters/x.py", "from skipsearch import adapt"),
    ("decoding/x.py", "import skipsearch\nskipsearch.tune"),
    ("evaluation/x.py", "from skipsearch.searchers import gp"),
    ("mask.py", "from skipsearch.stats import Trial"),
    ("profile/x.py", "import torch.nn"),
    ("stats.py", "from torch import Tensor"),
    ("attic/x.py", "import os"),
], ids=lambda text: str(text).rpartition("\n")[2])
def test_an_arrow_that_the_table_does_not_have_is_found(path: str, source: str) -> None:
    assert len(bad_arrows(source, path)) == 1


@pytest.mark.parametrize(("path", "source"), [
    ("decoding/x.py", "from skipsearch.models.spec import ModelAdapter"),
    ("decoding/x.py", "from skipsearch.decoding.decoder import Chunk\nfrom .sampling import Sampling\nimport torch"),
    ("searchers/x.py", "from skipsearch import SkipMask, __version__\nimport botorch\nX = 'skipsearch tune --model demo'"),
    ("machine.py", "import skipsearch\nprint(skipsearch.__version__)"),
    ("cli/x.py", "from skipsearch.tuning import tune"),
])
def test_an_arrow_that_the_table_has_is_let_through(path: str, source: str) -> None:
    assert bad_arrows(source, path) == []


def test_the_table_has_no_circles() -> None:
    waiting = {room: {a.partition(".")[0] for a in allowed if "." not in a} - {room} for room, allowed in ALLOWED.items()}
    drivers = {"compiler", "tuning"}   # two halves of one thing
    waiting = {room: allowed - (drivers if room in drivers else set()) for room, allowed in waiting.items()}
    while waiting:
        free = {room for room, allowed in waiting.items() if not allowed & waiting.keys()}
        assert free, f"these rooms import each other: {sorted(waiting)}"
        waiting = {room: allowed for room, allowed in waiting.items() if room not in free}


def test_no_file_has_two_ideas_in_it() -> None:
    long = {path: n for path in sources() if (n := len((PACKAGE / path).read_text("utf-8").splitlines())) > LONGEST_FILE}
    assert not long


def test_the_exported_names_are_these_and_each_leads_home() -> None:
    assert sorted(skipsearch.__all__) == [
        "Chunk", "DecodeError", "DecodeStats", "Decoder", "ExportError", "Generation", "MaskError", "ModelAdapter", "ModelError",
        "ModelSpec", "NotCarriedOut", "Profile", "ProfileError", "Recipe", "Request", "SearchError", "Session", "SkipMask",
        "SkipSearchError", "Task", "TaskError", "Trial", "__version__", "adapt", "attach", "detach", "generate", "load_model",
        "load_profile", "load_task", "save_profile", "tune"]
    for name in skipsearch.__all__:
        assert getattr(skipsearch, name) is not None
    assert set(skipsearch._HOME_OF) | {"__version__"} == set(skipsearch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'decoder'"):
        skipsearch.decoder  # noqa: B018


def run_python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd=PACKAGE.parent)
    return ran.stdout.strip()


def test_reading_a_profile_does_not_load_torch() -> None:
    profile = Path(__file__).parent / "profile" / "golden" / "v1_speculate.yaml"
    heavy = "{'torch', 'transformers', 'optuna', 'botorch'} & set(sys.modules)"
    assert run_python(f"import sys, skipsearch; skipsearch.load_profile({str(profile)!r}); print({heavy} or 'light')") == "light"


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    assert run_python("import sys, skipsearch; print([m for m in sys.modules if m.startswith('skipsearch.')])") == "['skipsearch.version']"
