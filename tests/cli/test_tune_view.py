"""What `tune` says at the end of what it was told on the way."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

import skipsearch
from skipsearch.cli.outside import Terminal
from skipsearch.cli.tune_view import TuneView
from skipsearch.profile import load_profile
from skipsearch.search import Noted

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
