"""`--engine auto` on the command line: the chosen engine and the message about it.

No time is measured here.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.command import cmd, run_in_process
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch import engine as engines
from skipsearch.cli import options
from skipsearch.cli.options import describe_choice, select_engine
from skipsearch.cli.tune import _study_engine
from skipsearch.core.machine import read_cpu_name
from skipsearch.engine import EngineChoice, load_model
from skipsearch.errors import SearchError
from skipsearch.models import ModelAdapter
from skipsearch.profile import Profile, load_profile, save_profile
from skipsearch.profile.paths import device_slug
from skipsearch.tuning import driver
from skipsearch.tuning.study import StudyStore

GOLDEN = Path(__file__).parents[1] / "profile" / "golden" / "v3_speculate.yaml"


def named(engine: str) -> ModelAdapter:
    """Return a model that reports this engine."""
    model, _ = tiny_model_and_reference()
    other = type("Adapter", (), {})()
    other.spec = replace(model.spec, engine=engine)
    return other  # type: ignore[return-value]


def never(*_: object) -> EngineChoice:
    raise AssertionError("nothing is to be measured here")


@pytest.mark.parametrize(
    ("chosen", "seconds", "line"),
    [
        (
            "graph",
            {"lean": 1.62, "graph": 1.0},
            "engine graph: 1.62 times as fast as lean at plain decoding here; --engine lean to "
            "choose otherwise",
        ),
        (
            "lean",
            {"lean": 1.0, "graph": 1.25},
            "engine lean: 1.25 times as fast as graph at plain decoding here; --engine graph to "
            "choose otherwise",
        ),
        (
            "lean",
            {"lean": 1.0, "graph": 0.97},
            "engine lean: 0.97 times as fast as graph at plain decoding here, which may be noise; "
            "--engine graph to choose otherwise",
        ),
    ],
)
def test_a_choice_is_one_line(chosen: str, seconds: dict[str, float], line: str) -> None:
    assert describe_choice(EngineChoice(named(chosen), seconds)) == line


def test_auto_measures_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = named("graph")
    monkeypatch.setattr(
        engines, "pick_fastest", lambda model: EngineChoice(taken, {"lean": 2.0, "graph": 1.0})
    )
    assert select_engine(named("lean"), "auto") is taken
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["engine graph", "llama"]
    assert said[1].endswith("engine graph")


def test_where_nothing_was_measured_nothing_is_said_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "pick_fastest", lambda model: EngineChoice(model))
    select_engine(named("hf"), "auto")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_engine_that_was_asked_for_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "pick_fastest", never)
    model = named("lean")
    assert select_engine(model, "lean", preferred_engine="graph") is model


def test_a_wanted_engine_is_taken_unmeasured_where_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, graph = named("lean"), named("graph")
    monkeypatch.setattr(engines, "pick_fastest", never)
    monkeypatch.setattr(
        engines, "switch_engine", lambda _, engine: {"lean": model, "graph": graph}.get(engine)
    )
    assert select_engine(model, "auto", preferred_engine="graph") is graph
    assert select_engine(model, "auto", preferred_engine="lean") is model


@pytest.mark.parametrize(
    ("wanted", "warning"),
    [
        ("native", "warning: the engine native is not ready here"),
        ("graph", "warning: the engine graph is not ready here"),
    ],
)
def test_the_fastest_stands_in_for_a_wanted_engine_that_is_not_ready(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wanted: str, warning: str
) -> None:
    model = named("lean")
    monkeypatch.setattr(engines, "pick_fastest", EngineChoice)
    assert select_engine(model, "auto", wanted) is model
    assert capsys.readouterr().err.splitlines()[0] == warning


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path / "cache"))


def measured_with(engine: str, file: Path) -> Path:
    """Return a profile of the embedded model, measured on another machine with this engine."""
    claim, demo = load_profile(GOLDEN), load_model("demo", device="cpu").spec
    model = claim.model.model_copy(
        update={"n_layers": demo.n_layers, "config_sha256": demo.config_sha256}
    )
    profile: Profile = claim.model_copy(update={"model": model, "engine": engine})
    save_profile(profile, file)
    return file


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(("engine", "taken"), [("hf", "hf"), ("lean", "lean"), ("graph", "lean")])
def test_decode_takes_the_engine_that_the_profile_was_measured_with(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    taken: str,
) -> None:
    file = measured_with(engine, tmp_path / "profile.yaml")
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *cmd("decode --profile {} --device cpu --prompt {} --max-new-tokens 4", file, "import os"),
    )
    assert code == 0, said
    assert f"engine {taken}" in said
    assert (
        ("the engine graph is not ready here" in said)
        == (engine == "graph")
        == ("measured with engine" in said)
    )


@pytest.mark.usefixtures("nothing_kept")
def test_decode_with_auto_looks_the_profile_up_before_it_takes_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profiles" / "demo" / "pycode"
    folder.mkdir(parents=True)
    measured_with(
        "native", folder / f"{device_slug(read_cpu_name())}--float32.yaml"
    )  # looked at before any bundled one
    wanted: list[str | None] = []
    monkeypatch.setattr(
        options, "_try_engine", lambda model, engine: wanted.append(engine) or model
    )
    code, _, said = run_in_process(
        capsys,
        monkeypatch,
        *cmd(
            "decode --model demo --profile auto --task pycode --profiles {} --device cpu --prompt "
            "{} --max-new-tokens 4",
            tmp_path / "profiles",
            "import os",
        ),
    )
    assert code == 0, said
    assert wanted == ["native"]


def begun(where: Path, identity: dict[str, object]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        StudyStore(where, {"n_layers": LAYERS, **identity}).close()
    return str(where)


def test_a_search_goes_on_with_the_engine_it_was_begun_with(tmp_path: Path) -> None:
    assert _study_engine(begun(tmp_path / "a.journal", {"engine": "native"})) == "native"
    assert _study_engine(begun(tmp_path / "b.journal", {})) is None
    assert _study_engine(str(tmp_path / "none.journal")) is None
    assert _study_engine("postgresql://nobody@localhost:1/none") is None


def test_tune_with_resume_asks_the_study_and_a_new_search_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[str | None] = []

    def search(*_: object, **__: object) -> Profile:
        raise SearchError("enough")

    monkeypatch.setattr(
        options, "_try_engine", lambda model, engine: wanted.append(engine) or model
    )
    monkeypatch.setattr(driver, "tune", search)
    journal = begun(tmp_path / "profile.journal", {"engine": "graph"})
    for more in (["--resume"], []):
        code, _, said = run_in_process(
            capsys,
            monkeypatch,
            *cmd(
                "tune --model demo --task pycode --device cpu --out {} --study {}",
                tmp_path / "profile.yaml",
                journal,
            ),
            *more,
        )
        assert code == 1
        assert said.endswith("error: enough")
    assert wanted == ["graph", None]
