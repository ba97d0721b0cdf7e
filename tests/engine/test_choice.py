"""Which engine `auto` takes: the fastest of those that are ready, which is decided by times that these tests make up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from helpers.tiny import small_world, tiny_llama

from skipsearch.engine import ENGINES, choice, current, fastest, load_model, ready
from skipsearch.engine.choice import LEAST, MARGIN, Choice, pass_seconds
from skipsearch.engine.graph import GraphAdapter
from skipsearch.engine.native import NativeAdapter, library
from skipsearch.errors import ModelError
from skipsearch.models import ModelAdapter, adapt
from skipsearch.models.families import family_of
from skipsearch.models.lean import LeanAdapter, fuse


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for built code in which nothing is kept yet."""
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SKIPSEARCH_NATIVE")
    monkeypatch.setattr(library, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def lean() -> LeanAdapter:
    hf = tiny_llama()
    return fuse(hf, replace(adapt(hf).spec, engine="lean"), family_of(hf.config))


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
    on_a_cpu = choice.ready
    monkeypatch.setattr(choice, "ready", lambda model, engine: GraphAdapter(model) if engine == "graph" else on_a_cpu(model, engine))


@pytest.mark.usefixtures("graph_is_ready")
@pytest.mark.parametrize(("graph", "taken"), [(0.5, "graph"), (1 / (1 + MARGIN) - 0.001, "graph"), (1 / (1 + MARGIN) + 0.001, "lean"),
                                              (1.0, "lean"), (1.3, "lean")])
def test_lean_stays_unless_another_is_faster_beyond_noise(lean: LeanAdapter, graph: float, taken: str) -> None:
    found = fastest(lean, taking(lean=1.0, graph=graph))
    assert found.model.spec.engine == taken
    assert found.seconds == {"lean": 1.0, "graph": graph}
    assert (found.model is lean) == (taken == "lean")
    assert lean.spec.engine == "lean", "what lost leaves no name behind"


@pytest.mark.usefixtures("graph_is_ready")
def test_what_was_recorded_to_measure_is_let_go_of(lean: LeanAdapter) -> None:
    measured: list[ModelAdapter] = []

    def timing(models: Sequence[ModelAdapter]) -> list[float]:
        measured.extend(models)
        return [2.0, 1.0]

    taken = fastest(lean, timing).model
    assert isinstance(taken, GraphAdapter)
    assert taken not in measured
    assert taken.lean is lean, "the weights are shared"


@pytest.mark.usefixtures("graph_is_ready")
def test_without_room_to_record_lean_stays(lean: LeanAdapter) -> None:
    def timing(models: Sequence[ModelAdapter]) -> list[float]:
        raise torch.OutOfMemoryError("no room")

    assert fastest(lean, timing) == Choice(lean)


def test_where_one_engine_alone_is_ready_nothing_is_measured(lean: LeanAdapter) -> None:
    hf, _ = small_world()
    assert fastest(lean, never) == Choice(lean, {})
    assert fastest(hf, never) == Choice(hf, {})


def test_ready_takes_no_second_copy_of_the_weights(lean: LeanAdapter) -> None:
    hf, _ = small_world()
    assert ready(lean, "lean") is lean
    assert ready(hf, "hf") is hf
    assert [ready(lean, engine) for engine in ("hf", "graph", "compiled", "native", "warp")] == [None] * 5, "nothing is built"
    assert [ready(hf, engine) for engine in ("lean", "graph", "compiled", "native")] == [None] * 4


@pytest.fixture
def built(lean: LeanAdapter, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library, such as another process left it, which nothing here calls."""
    monkeypatch.setattr(library, "load", lambda code, instructions: object())
    library.open_shelf().keep(library._name(library.best_set()), b"code")


@pytest.mark.usefixtures("built")
def test_native_is_taken_where_it_was_built_and_nothing_is_measured(lean: LeanAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fastest(lean, never)
    assert isinstance(found.model, NativeAdapter)
    assert (found.model.lean, found.seconds) == (lean, {})
    assert ready(found.model, "native") is found.model
    assert ready(found.model, "compiled") is found.model, "an engine that native took the place of"


@pytest.mark.usefixtures("built")
def test_native_is_left_alone_where_the_environment_says_so(lean: LeanAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSEARCH_NATIVE", "0")
    assert fastest(lean, never).model is lean


def test_asking_makes_no_folder(lean: LeanAdapter, cache: Path) -> None:
    assert ready(lean, "native") is None
    assert not cache.exists()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("flaw", ["missing", "damaged", "not loadable", "others may write"])
def test_native_is_not_ready_where_its_code_is_missing_or_not_to_be_run(lean: LeanAdapter, cache: Path, monkeypatch: pytest.MonkeyPatch,
                                                                        flaw: str) -> None:
    one, = (cache / "compiled").iterdir()
    if flaw == "missing":
        one.unlink()
    elif flaw == "damaged":
        one.write_bytes(one.read_bytes() + b"x")
    elif flaw == "not loadable":
        monkeypatch.setattr(library, "load", full)
    else:
        one.parent.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")   # nobody asked for it, so nobody is told
        assert ready(lean, "native") is None
        assert fastest(lean, never) == Choice(lean)


def test_load_model_itself_measures_and_builds_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(choice, "pass_seconds", never)
    assert load_model("synthetic:2x64", device="cpu").spec.engine == "lean"
    assert not (cache / "compiled").exists()


@pytest.mark.thorough
@pytest.mark.skipif(library.compiler_here() is None, reason="needs a C++ compiler")
def test_load_model_takes_native_where_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    load_model("synthetic:2x64", device="cpu", engine="compiled")   # which is another name for it
    assert load_model("synthetic:2x64", device="cpu").spec.engine == "native"
    assert load_model("synthetic:2x64", device="cpu", settled=False).spec.engine == "lean"
    monkeypatch.setenv("SKIPSEARCH_NATIVE", "0")
    assert load_model("synthetic:2x64", device="cpu").spec.engine == "lean"


def test_passes_of_all_are_timed_in_turns_and_the_first_does_not_count(lean: LeanAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only passes move: the first of each takes a minute."""
    now, passes = [0.0], []
    real = choice.forward

    def timed(model: ModelAdapter, *rest: object) -> torch.Tensor:
        engine = model.spec.engine
        now[0] += 60.0 if engine not in passes else {"lean": 2.0, "graph": 1.0}[engine]
        passes.append(engine)
        return real(model, *rest)   # type: ignore[arg-type]

    monkeypatch.setattr(choice, "forward", timed)
    monkeypatch.setattr(choice, "perf_counter", lambda: now[0])
    assert pass_seconds([lean, GraphAdapter(lean)]) == [2.0, 1.0]
    assert passes == ["lean", "graph"] * (1 + LEAST), "slow passes are run as few times as will do"


def test_fast_passes_are_run_for_a_second_at_most(lean: LeanAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(choice, "perf_counter", lambda: next(ticks) / 1000)
    monkeypatch.setattr(choice, "MOST", 10_000)
    runs: list[int] = []
    monkeypatch.setattr(choice, "forward", lambda *_: runs.append(1) or torch.zeros(1, 1, 4))
    assert pass_seconds([lean]) == [pytest.approx(0.001)]
    assert len(runs) == pytest.approx(1000 / 3, abs=3), "a turn reads this clock three times"


def test_a_short_context_is_kept_to() -> None:
    short = fuse(hf := tiny_llama(context=16), replace(adapt(hf).spec, engine="lean"), family_of(hf.config))
    assert all(seconds > 0 for seconds in pass_seconds([short, GraphAdapter(short)]))


def test_the_name_of_an_engine_that_is_gone_stands_for_the_one_in_its_place() -> None:
    assert current("compiled") == "native"
    assert all(current(engine) == engine for engine in ENGINES)
