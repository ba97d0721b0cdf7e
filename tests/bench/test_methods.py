"""The table of methods: every method takes part, at settings from calibration text, and none changes a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation.small_search import COSTS, small_model, small_task
from helpers.command import in_process
from helpers.modules import MASK, card_of, copies
from helpers.threads import one_thread

from skipsearch import tuning
from skipsearch.bench import methods as table
from skipsearch.bench.methods import MethodRow, as_markdown, methods, with_conditions
from skipsearch.modules.files import sha256
from skipsearch.modules.weights import save_module
from skipsearch.recipe import DRAFTERS

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "table_costs", lambda *_, **__: COSTS)
    monkeypatch.setattr(table, "TRIALS", 4)
    monkeypatch.setattr("skipsearch.search.SEEDS", {})


@pytest.mark.thorough
def test_every_method_takes_part_and_no_token_changes(tmp_path: Path) -> None:
    model = small_model()
    save_module(tmp_path / "adapted-6.safetensors", card_of(model, MASK), copies(model, MASK, 0.05))
    rows = methods(model, small_task(), [tmp_path], theirs=model)
    masks = [f"mask by {name}" for name in ("clasp", "asd", "s3d", "gp")]
    others = ["draft & verify", "mask by auto", "clasp", "asd", "swift", "adapted (adapted-6)"]
    theirs = ["Hugging Face, plain", "Hugging Face, early exit"]
    assert [row.method for row in rows] == ["plain", "lookup", *masks, *others, *theirs, "best recipe"]
    assert {row.method.partition(" ")[0] for row in rows} >= set(DRAFTERS) - {"skip", "kangaroo", "s3d"}, "every kind that needs no module"
    assert all(row.identical == row.prompts == 3 for row in rows)
    assert rows[0].speedup.mean == 1
    assert rows[0].alpha is None
    assert all(row.alpha is not None and row.tau is not None for row in (*rows[2:12], rows[-1]))
    assert "adaptive" in rows[6].recipe
    assert rows[11].needs == "0 min of training, 0.028 M values beside the model's"
    assert [MethodRow.from_dict(json.loads(json.dumps(row.as_dict()))) for row in rows] == rows
    found = json.loads(json.dumps(with_conditions(model, "small", [tmp_path], rows)))
    assert found["modules"] == {"adapted-6.safetensors": sha256(tmp_path / "adapted-6.safetensors")}
    assert len(found["rows"]) == len(rows)
    lines = as_markdown(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| plain | 1.00× (1.00–1.00) |")


@pytest.mark.parametrize("arguments", [("--model", "demo", "--modules", "x"), ("--model", "demo", "--methods", "--peers", "plain")])
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, shown = in_process(capsys, monkeypatch, "bench", *arguments)
    assert code == 2
    assert "--methods" in shown
