"""Engine `auto` picks the fastest engine that is ready; the tests make the times up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import tiny_llama, tiny_model_and_reference

from skipsearch.engine import load_model, pick_fastest, select, switch_engine
from skipsearch.engine.cuda_graph import GraphAdapter
from skipsearch.engine.native import NativeAdapter, build
from skipsearch.engine.select import MIN_ADVANTAGE, MIN_REPEATS, EngineChoice, time_passes
from skipsearch.errors import ModelError
from skipsearch.models import ModelAdapter, adapt, stored_checks
from skipsearch.models.check import CheckResult
from skipsearch.models.families.table import family_of
from skipsearch.models.fused.fused_adapter import FusedAdapter, fuse_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for built code in which nothing is kept yet."""
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SKIPSEARCH_NATIVE")
    monkeypatch.setattr(build, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def lean() -> FusedAdapter:
    hf = tiny_llama()
    return fuse_model(hf, replace(adapt(hf).spec, engine="lean"), family_of(hf.config))


def taking(**seconds: float) -> Callable[[Sequence[ModelAdapter]], list[float]]:
    """Passes that take as long as it says, by engine."""
    return lambda models: [seconds[model.spec.engine] for model in models]


def full(*_: object) -> None:
    raise ModelError("the temporary folder is full")


def never(*_: object) -> list[float]:
    raise AssertionError("nothing is to be measured here")


@pytest.fixture
def graph_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; a graph adapter runs on a CPU too, unrecorded."""
    on_a_cpu = select.switch_engine
    monkeypatch.setattr(
        select,
        "switch_engine",
        lambda model, engine: GraphAdapter(model) if engine == "graph" else on_a_cpu(model, engine),
    )


@pytest.mark.usefixtures("graph_is_ready")
@pytest.mark.parametrize(
    ("graph", "taken"),
    [
        (0.5, "graph"),
        (1 / (1 + MIN_ADVANTAGE) - 0.001, "graph"),
        (1 / (1 + MIN_ADVANTAGE) + 0.001, "lean"),
        (1.0, "lean"),
        (1.3, "lean"),
    ],
)
def test_lean_stays_unless_another_is_faster_beyond_noise(
    lean: FusedAdapter, graph: float, taken: str
) -> None:
    found = pick_fastest(lean, taking(lean=1.0, graph=graph))
    assert found.model.spec.engine == taken
    assert found.pass_seconds == {"lean": 1.0, "graph": graph}
    assert (found.model is lean) == (taken == "lean")
    assert lean.spec.engine == "lean", "what lost leaves no name behind"


@pytest.mark.usefixtures("graph_is_ready")
def test_what_was_recorded_to_measure_is_let_go_of(lean: FusedAdapter) -> None:
    measured: list[ModelAdapter] = []

    def timing(models: Sequence[ModelAdapter]) -> list[float]:
        measured.extend(models)
        return [2.0, 1.0]

    taken = pick_fastest(lean, timing).model
    assert isinstance(taken, GraphAdapter)
    assert taken not in measured
    assert taken.fused_model is lean, "the weights are shared"


@pytest.mark.usefixtures("graph_is_ready")
def test_without_room_to_record_lean_stays(lean: FusedAdapter) -> None:
    def timing(models: Sequence[ModelAdapter]) -> list[float]:
        raise torch.OutOfMemoryError("no room")

    assert pick_fastest(lean, timing) == EngineChoice(lean)


def test_where_one_engine_alone_is_ready_nothing_is_measured(lean: FusedAdapter) -> None:
    hf, _ = tiny_model_and_reference()
    assert pick_fastest(lean, never) == EngineChoice(lean, {})
    assert pick_fastest(hf, never) == EngineChoice(hf, {})


def test_ready_takes_no_second_copy_of_the_weights(lean: FusedAdapter) -> None:
    hf, _ = tiny_model_and_reference()
    assert switch_engine(lean, "lean") is lean
    assert switch_engine(hf, "hf") is hf
    assert [switch_engine(lean, engine) for engine in ("hf", "graph", "native", "warp")] == [
        None
    ] * 4, "nothing is built"
    assert [switch_engine(hf, engine) for engine in ("lean", "graph", "native")] == [None] * 3


@pytest.fixture
def built(lean: FusedAdapter, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library, such as another process left it, and a check of it that passed. Nothing
    here calls it.
    """
    monkeypatch.setattr(
        build, "load_library", lambda code, instructions: SimpleNamespace(sha256="a" * 64)
    )
    monkeypatch.setattr(
        stored_checks, "load_check_result", lambda *_: CheckResult({}, 1.0, 1.0, spans=False)
    )
    build.open_code_cache().store(build._cache_name(build.best_instruction_set()), b"code")


@pytest.mark.usefixtures("built")
def test_native_is_taken_where_it_was_built_and_nothing_is_measured(
    lean: FusedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pick_fastest(lean, never)
    assert isinstance(found.model, NativeAdapter)
    assert (found.model.fused_model, found.pass_seconds) == (lean, {})
    assert switch_engine(found.model, "native") is found.model


@pytest.mark.usefixtures("built")
def test_native_is_left_alone_where_the_environment_says_so(
    lean: FusedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPSEARCH_NATIVE", "0")
    assert pick_fastest(lean, never).model is lean


def test_asking_makes_no_folder(lean: FusedAdapter, cache: Path) -> None:
    assert switch_engine(lean, "native") is None
    assert not cache.exists()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("flaw", ["missing", "damaged", "not loadable", "others may write"])
def test_native_is_not_ready_where_its_code_is_missing_or_not_to_be_run(
    lean: FusedAdapter, cache: Path, monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    (one,) = (cache / "compiled").iterdir()
    if flaw == "missing":
        one.unlink()
    elif flaw == "damaged":
        one.write_bytes(one.read_bytes() + b"x")
    elif flaw == "not loadable":
        monkeypatch.setattr(build, "load_library", full)
    else:
        one.parent.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody asked for it, so nobody is told
        assert switch_engine(lean, "native") is None
        assert pick_fastest(lean, never) == EngineChoice(lean)


def test_load_model_itself_measures_and_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(select, "time_passes", never)
    assert load_model("synthetic:2x64", device="cpu").spec.engine == "lean"
    assert not (cache / "compiled").exists()


@pytest.mark.thorough
@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_load_model_takes_native_where_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    load_model("synthetic:2x64", device="cpu", engine="native")
    assert load_model("synthetic:2x64", device="cpu").spec.engine == "native"
    assert load_model("synthetic:2x64", device="cpu", allow_native=False).spec.engine == "lean"
    monkeypatch.setenv("SKIPSEARCH_NATIVE", "0")
    assert load_model("synthetic:2x64", device="cpu").spec.engine == "lean"


def test_passes_of_all_are_timed_in_turns_and_the_first_does_not_count(
    lean: FusedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only passes move: the first of each takes a minute."""
    now, passes = [0.0], []
    real = select.forward

    def timed(model: ModelAdapter, *rest: object) -> torch.Tensor:
        engine = model.spec.engine
        now[0] += 60.0 if engine not in passes else {"lean": 2.0, "graph": 1.0}[engine]
        passes.append(engine)
        return real(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(select, "forward", timed)
    monkeypatch.setattr(select, "perf_counter", lambda: now[0])
    assert time_passes([lean, GraphAdapter(lean)]) == [2.0, 1.0]
    assert passes == ["lean", "graph"] * (1 + MIN_REPEATS), (
        "slow passes are run as few times as will do"
    )


def test_fast_passes_are_run_for_a_second_at_most(
    lean: FusedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(select, "perf_counter", lambda: next(ticks) / 1000)
    monkeypatch.setattr(select, "MAX_REPEATS", 10_000)
    runs: list[int] = []
    monkeypatch.setattr(select, "forward", lambda *_: runs.append(1) or torch.zeros(1, 1, 4))
    assert time_passes([lean]) == [pytest.approx(0.001)]
    assert len(runs) == pytest.approx(1000 / 3, abs=3), "a turn reads this clock three times"


def test_a_short_context_is_kept_to() -> None:
    short = fuse_model(
        hf := tiny_llama(context=16), replace(adapt(hf).spec, engine="lean"), family_of(hf.config)
    )
    assert all(seconds > 0 for seconds in time_passes([short, GraphAdapter(short)]))
