"""What `tune` says at the end of what it was told on the way."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from helpers.profiles import GOLDEN

import skipsearch
from skipsearch.cli.outside import Terminal
from skipsearch.cli.tune_view import TuneView
from skipsearch.profile import load_profile
from skipsearch.search import Noted, Raced
from skipsearch.stats import Estimate

PROFILE = min((Path(skipsearch.__file__).parent / "demo" / "profiles" / "demo" / "pycode").glob("*.yaml"))


@pytest.mark.parametrize("doubtful", [True, False])
def test_measurements_in_doubt_are_called_so_again_where_the_profile_is_written(doubtful: bool) -> None:
    told, said = StringIO(), StringIO()
    with TuneView(Terminal(file=told)) as view:
        view(Noted("the machine is what it is", doubtful))
        view(Noted("and something else, that casts no doubt on anything"))
    view.summary(Terminal(file=said, width=200), load_profile(PROFILE), Path("here.yaml"))
    assert "the machine is what it is" in told.getvalue()
    assert ("tune again on a quiet one before you share it" in said.getvalue()) == doubtful
    assert "written to here.yaml" in said.getvalue()


@pytest.mark.parametrize(("name", "drawn", "told"), [
    ("speculate", True, "1.337× (1.31–1.366) faster than plain decoding"),
    ("mixed", True, "lookup: 400 rounds, 3200 tokens drafted, 1900 accepted (59%)"),
    ("lost", True, "the best recipe measured 0.97×"), ("plain", False, "this profile decodes plainly")])
def test_the_summary_of_any_recipe(name: str, drawn: bool, told: str) -> None:
    said, profile = StringIO(), load_profile(GOLDEN / f"v2_{name}.yaml")
    with TuneView(Terminal(file=StringIO())) as view:
        view(Raced(profile.candidate, 1.3, Estimate(1.2, 1.1, 1.3), "calibration", 6))
    view.summary(Terminal(file=said, width=200), profile, Path("here.yaml"))
    assert told in said.getvalue()
    assert str(profile.candidate) in said.getvalue()
    assert ("attn  " in said.getvalue()) == drawn
