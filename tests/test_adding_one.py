"""docs/extending.md keeps its word: a searcher and an exit policy are one file and one line each, a
drafter is a folder and one line, and the code there works.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import skipsearch
from skipsearch.drafters import base as drafter_port
from skipsearch.drafters.exits import exit_base as exit_port
from skipsearch.searchers import base as searcher_port

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


MAP = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str, page: str = GUIDE) -> str:
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def blocks(title: str, kind: str = "python") -> list[str]:
    """The code of a section, in order."""
    return [
        dedent(code)
        for code in re.findall(
            rf"^ *```{kind}\n(.*?)^ *```$", section(title), re.DOTALL | re.MULTILINE
        )
    ]


RANKED, LEARNING, SEARCHER_LINE = blocks("Adding a searcher")
# The class in the docstring of the port.
GROWING = """
from collections.abc import Collection

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial
from skipsearch.searchers.base import SearchProblem

""" + dedent(re.findall(r"^    class .*", searcher_port.__doc__ or "", re.DOTALL | re.MULTILINE)[0])
DRAFTER, DRAFTER_SESSION, DRAFTER_LINE, SPEC = blocks("Adding a drafter")
(RECIPE,) = blocks("Adding a drafter", "yaml")
EXIT, EXIT_LINE = blocks("Adding an exit policy")
SEARCHERS = ("mine", "climber", "growing")


def add_line(source: str, table: str, line: str) -> str:
    """A Python file with one more line in its dictionary `table`."""
    written, n = re.subn(rf"^({table}\b.*\{{\n)", rf"\1    {line}", source, flags=re.MULTILINE)
    assert n == 1
    return written


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A folder with a copy of the package, changed as the three sections say and in no other
    way.
    """
    package = tmp_path / "skipsearch"
    shutil.copytree(
        ROOT / "skipsearch", package, ignore=shutil.ignore_patterns("__pycache__", "model")
    )
    again = package / "drafters" / "again"
    again.mkdir()
    (again / "__init__.py").touch()
    (again / "spec.py").write_text(DRAFTER)
    (again / "session.py").write_text(DRAFTER_SESSION)
    (package / "drafters" / "exits" / "joint.py").write_text(EXIT)
    (package / "searchers" / "mine.py").write_text(RANKED)
    (package / "searchers" / "climber.py").write_text(LEARNING)
    (package / "searchers" / "growing.py").write_text(GROWING)
    searchers = package / "searchers" / "__init__.py"
    source = searchers.read_text()
    for name in SEARCHERS:
        line = SEARCHER_LINE.replace("mine", name).replace("Mine", name.capitalize())
        source = add_line(source, "SEARCHERS", line)
    searchers.write_text(source)
    tables = package / "core" / "recipe.py"
    tables.write_text(
        add_line(add_line(tables.read_text(), "DRAFTERS", DRAFTER_LINE), "EXITS", EXIT_LINE)
    )
    profile = (ROOT / "tests" / "profile" / "golden" / "v3_unmeasured.yaml").read_text()
    (tmp_path / "profile.yaml").write_text(
        re.sub(r"^drafters:\n(  .*\n)*", lambda _: RECIPE, profile, flags=re.MULTILINE).replace(
            "n_layers: 40", "n_layers: 5"
        )
    )
    return tmp_path


def python(house: Path, *arguments: str) -> str:
    """What Python prints that finds the changed copy first."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(house), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=house,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_a_drafter_and_an_exit_policy_need_their_files_and_one_line_each(house: Path) -> None:
    (house / "use.py").write_text(USE)
    found = json.loads(python(house, "use.py").splitlines()[-1])
    assert found["copy"] == str(house)
    assert found["drafters"]["again"]["what it does"] == "the last token once more, and once more."
    assert (
        found["exits"]["joint"]
        == "stop when all tokens drafted so far are unlikely to stand together."
    )
    assert found["loaded"] == [
        {"kind": "again", "draft_length": 3},
        {
            "kind": "skip",
            "draft_length": 5,
            "attn": [1],
            "mlp": [0, 2],
            "exit": {"kind": "joint", "threshold": 0.3},
        },
    ]
    assert found["dumped"] == found["loaded"]
    assert found["lossless"] == [True, True]
    assert found["drafted"] == [[True, False], [True]], "the first that proposes something drafts"
    assert all("joint" in kinds for kinds in found["swept"])


def test_both_searchers_pass_the_conformance_suite(house: Path) -> None:
    shutil.copytree(
        ROOT / "tests" / "searchers",
        house / "conforming",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    said = python(
        house,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rA",
        "--rootdir",
        ".",
        "-k",
        " or ".join(SEARCHERS),
        "conforming/test_conformance.py",
    )
    for name in SEARCHERS:
        for test in ("never_proposes_a_mask_twice", "telling_everything_again_resumes_the_search"):
            assert re.search(rf"PASSED .*test_{test}\[{name}\]", said), said


@pytest.mark.slow
def test_the_contracts_hold_for_both(house: Path) -> None:
    """Slow, because Transformers is loaded anew."""
    contract = add_line(
        (ROOT / "tests" / "drafters" / "test_drafter_contract.py").read_text(), "SPECS", SPEC
    )
    port = "\nfrom skipsearch.drafters.base"
    (house / "test_drafters.py").write_text(
        contract.replace(port, f"\nfrom skipsearch.drafters.again.spec import Again{port}", 1)
    )
    (house / "test_exits.py").write_text(
        (ROOT / "tests" / "drafters" / "test_exit_contract.py").read_text()
    )
    said = python(
        house,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rA",
        "--rootdir",
        ".",
        "-k",
        "again or joint",
        "test_drafters.py",
        "test_exits.py",
    )
    for name in (
        "test_decoding_with_it_is_lossless[4-again]",
        "test_its_vectorised_form_is_the_rule_itself[joint]",
    ):
        assert re.search(rf"PASSED .*{re.escape(name)}", said), said


USE = '''
import contextlib, io, json, sys
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml

import skipsearch
from skipsearch.models.kv_cache import KVCache
from skipsearch.cli.main import main
from skipsearch.decoding import Decoder
from skipsearch.replay.sweep import coarse_policies, fine_policies
from skipsearch.models.adapter import ModelSpec
from skipsearch.profile import load_profile, save_profile


class Tiny:
    """One head, a table of 32 embeddings, no positions: small enough to need nothing but torch."""

    tokenizer = pass_runner = None

    def __init__(self, layers, width=16, vocab=32):
        torch.manual_seed(0)
        self.spec = ModelSpec(
            "tiny", None, "llama", layers, width, vocab, None, torch.float64, torch.device("cpu")
        )
        self.table = torch.randn(vocab, width, dtype=torch.float64)
        self.weights = 0.2 * torch.randn(layers, 2, width, width, dtype=torch.float64)

    def new_cache(self, batch, capacity):
        return KVCache(self.spec.n_layers, batch, capacity)

    def embed(self, tokens, positions=None):
        return self.table[tokens]

    def block(self, i, h, cache, plan, *, attn=True, mlp=True):
        if attn:
            kv = (h @ self.weights[i, 0])[:, None]
            keys, values = cache.write(i, kv, kv, plan)
            causal = plan.mask is None and h.shape[1] > 1
            attention = F.scaled_dot_product_attention
            h = h + attention(h[:, None], keys, values, plan.mask, is_causal=causal)[:, 0]
        return h + torch.tanh(h @ self.weights[i, 1]) if mlp else h

    def head(self, h):
        return h @ self.table.T.roll(1, 0)


def listed(what):
    sys.argv, printed = ["skipsearch", "list", what, "--json"], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main()
    return json.loads(printed.getvalue())


profile = load_profile("profile.yaml")
save_profile(profile, Path("again.yaml"))
recipes = [profile.recipe, skipsearch.Recipe(profile.drafters[1:])]
model = Tiny(profile.model.n_layers)
plain = Decoder(model).generate([5, 17, 30], 40).tokens
assert len(set(plain)) > 3, plain
ran = [Decoder(model, recipe).generate([5, 17, 30], 40) for recipe in recipes]
print(json.dumps({
    "copy": str(Path(skipsearch.__file__).parents[1]),
    "drafters": listed("drafters"), "exits": listed("exits"),
    "loaded": profile.recipe.as_data(), "dumped": load_profile("again.yaml").recipe.as_data(),
    "lossless": [result.tokens == plain for result in ran],
    "drafted": [[counts.drafted > 0 for counts in result.stats.by_drafter] for result in ran],
    "swept": [
        [policy.exit.kind for policy in policies]
        for policies in (coarse_policies(8), fine_policies(8))
    ]}))
'''


def test_the_ports_show_the_same_code() -> None:
    """The docstring of the drafters' port has both files, without the import between them."""
    spec, session, rule = (
        re.sub(r"^ +from .*\n\n", "", code[code.index("\nclass ") :], flags=re.MULTILINE).strip()
        for code in (DRAFTER, DRAFTER_SESSION, EXIT)
    )
    for port, body in ((drafter_port, f"{spec}\n\n\n{session}"), (exit_port, rule)):
        indented = "\n".join(f"    {line}" if line else "" for line in body.splitlines())
        assert indented in (port.__doc__ or ""), (
            f"the docstring of {port.__name__} and docs/extending.md differ"
        )


def test_the_map_names_every_file_and_folder_of_the_package() -> None:
    rows = [
        line for line in section("The map of the code", MAP).splitlines() if line.startswith("| `")
    ]
    named = set(re.findall(r"`([\w./]+)`", "".join(rows)))
    package = Path(skipsearch.__file__).parent
    here = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in package.iterdir()
        if not path.name.startswith("__")
    }
    assert here <= named
    gone = {
        name
        for name in named - here
        if name.endswith((".py", "/")) and not list(package.rglob(name))
    }
    assert not gone
