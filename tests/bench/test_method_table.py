"""The table of methods: each method has settings from calibration text and changes no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command import run_in_process
from helpers.gguf_files import write_model
from helpers.modules import SMALL_MASK, make_card, noisy_copies
from helpers.threads import one_thread
from helpers.tiny import tiny_llama
from tuning.small_search import COSTS, small_model, small_task

from skipsearch.bench import ExternalSystem
from skipsearch.bench import method_table as table
from skipsearch.bench.hugging_face import HFGenerate
from skipsearch.bench.method_table import MethodRow, compare_methods, to_markdown, to_report_data
from skipsearch.cli import bench_methods
from skipsearch.cli.bench_methods import list_usual_programs
from skipsearch.core.recipe import DRAFTERS
from skipsearch.drafters.trained.module_files import hash_module_file
from skipsearch.drafters.trained.module_weights import save_module
from skipsearch.tuning import calibration

__all__ = ["one_thread"]

SEARCH_S = 0.5  # of each searcher


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_task_costs", lambda *_, **__: COSTS)
    monkeypatch.setattr("skipsearch.tuning.search_loop.INITIAL_DESIGN", {})


@pytest.mark.thorough
def test_every_method_takes_part_and_no_token_changes(tmp_path: Path) -> None:
    model = small_model()
    save_module(
        tmp_path / "adapted-6.safetensors",
        make_card(model, SMALL_MASK),
        noisy_copies(model, SMALL_MASK, 0.05),
    )
    modules = small_model(fuse=False)
    programs = [
        ExternalSystem(name, "hf", modules, HFGenerate(name, modules))
        for name in ("hf-generate", "hf-early-exit")
    ]
    rows = compare_methods(model, small_task(), [tmp_path], programs=programs, search_s=SEARCH_S)
    masks = [f"mask by {name}" for name in ("clasp", "asd", "s3d", "tpe", "gp")]
    others = ["draft & verify", "mask by auto", "clasp", "asd", "swift", "adapted (adapted-6)"]
    theirs = ["Hugging Face, plain", "Hugging Face, early exit"]
    assert [row.method for row in rows] == [
        "plain",
        "lookup",
        *masks,
        *others,
        *theirs,
        "best recipe",
    ]
    assert {row.method.partition(" ")[0] for row in rows} >= set(DRAFTERS) - {
        "skip",
        "kangaroo",
        "s3d",
        "mtp",
        "draft-model",
    }, "every kind that needs no module and no second model"
    assert all(row.identical == row.prompts == 3 for row in rows)
    assert rows[0].speedup.mean == 1
    assert rows[0].alpha is None
    assert all(row.alpha is not None and row.tau is not None for row in (*rows[2:13], rows[-1]))
    assert "adaptive" in rows[7].recipe
    assert rows[12].needs == "0 min of training, 0.028 M values beside the model's"
    assert [MethodRow.from_dict(json.loads(json.dumps(row.as_dict()))) for row in rows] == rows
    found = json.loads(json.dumps(to_report_data(model, "small", [tmp_path], rows)))
    assert found["modules"] == {
        "adapted-6.safetensors": hash_module_file(tmp_path / "adapted-6.safetensors")
    }
    assert len(found["rows"]) == len(rows)
    lines = to_markdown(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| plain | 1.00× (1.00–1.00) |")
    predicted = {row.method for row in rows if row.predicted is not None}
    assert predicted == {"lookup", *masks, "mask by auto", "adapted (adapted-6)", "best recipe"}


def test_a_draft_model_takes_part_with_what_it_may_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(table, "OFFLINE_SEARCHERS", {"clasp": ""})
    monkeypatch.setattr(table, "ONLINE_DRAFTERS", ())
    write_model(tiny_llama(), tmp_path / "small.gguf", "Q4_0")
    rows = compare_methods(
        small_model(), small_task(), search_s=SEARCH_S, draft_models=[str(tmp_path / "small.gguf")]
    )
    by_name = {row.method: row for row in rows}
    assert [*by_name][3:5] == ["draft-model small.gguf", "draft-model small.gguf, masked"]
    for row in rows[3:5]:
        assert row.identical == row.prompts == 3
        assert row.recipe.startswith("draft-model")
        assert row.predicted is not None
        assert row.alpha is not None
    assert by_name["draft-model small.gguf, masked"].recipe != rows[3].recipe


@pytest.mark.parametrize(
    ("options", "programs"),
    [
        (("--engine", "lean"), ["hf-generate", "hf-early-exit"]),
        (("--engine", "lean", "--programs", "hf-generate"), ["hf-generate"]),
        (("--engine", "lean", "--programs", "none"), []),
    ],
)
def test_the_command_hands_its_options_to_the_comparison(
    options: tuple[str, ...],
    programs: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def compare(model, task, modules, n_prompts, *, on_event, programs, search_s, draft_models):  # type: ignore[no-untyped-def]
        engine, names = model.spec.engine, [program.name for program in programs]
        calls.append((engine, task.name, modules, n_prompts, names, search_s, draft_models))
        return []

    monkeypatch.setattr(table, "compare_methods", compare)
    common = ("--model", "demo", "--modules", tmp_path, "--prompts", 2, "--budget", "2m")
    common = (*common, "--draft-models", "small.gguf, other")
    code, printed, shown = run_in_process(
        capsys, monkeypatch, "bench", "methods", *common, *options, "--threads", 1
    )
    assert code == 0, shown
    assert calls == [("lean", "pycode", [tmp_path], 2, programs, 120.0, ["small.gguf", "other"])]
    assert printed == to_markdown([])


def test_weights_that_transformers_must_unpack_are_compared_with_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(bench_methods, "find_spec", lambda name: None)
    assert list_usual_programs(str(file), None) == []
    monkeypatch.setattr(bench_methods, "find_spec", lambda name: name)
    assert list_usual_programs(str(file), None) == ["llama-cpp"]
    assert list_usual_programs("demo", "native-4bit") == ["llama-cpp"]
    assert list_usual_programs("demo", None) == ["hf-generate", "hf-early-exit"]


def test_an_unknown_program_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", "no/such", "--programs", "llama-cpp,ollama")
    code, _, shown = run_in_process(capsys, monkeypatch, "bench", "methods", *options)
    assert code == 2
    assert "--programs has ollama; it knows hf-generate" in " ".join(shown.split())
    assert set(bench_methods.PROGRAMS) == set(table.PROGRAM_TITLES)
