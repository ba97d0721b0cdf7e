"""The latency table: several context lengths, kept between searches, and measured anew when the machine is not what it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import LAYERS, small_world

from skipsearch.costs import Costs
from skipsearch.evaluation import table
from skipsearch.evaluation.latency import Measured
from skipsearch.evaluation.table import CHECKED_MASKS, LatencyTable, fingerprint, latency_table


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    return tmp_path / "latency"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(longest draft, context) of each measurement on a machine that is always as fast as `made_up` says."""
    asked: list[tuple[int, int]] = []

    def measure(model: Any, max_draft: int, context: int, repeats: int = 3, masks: Any = ()) -> Measured:
        asked.append((max_draft, context))
        return Measured(context, made_up(context), 0.01, (0.02,) * len(masks))

    def plain_seconds(model: Any, context: int) -> float:
        asked.append((0, context))
        return made_up(context).verify[0]

    monkeypatch.setattr(table, "measure", measure)
    monkeypatch.setattr(table, "plain_seconds", plain_seconds)
    return asked


def made_up(context: int, factor: float = 1.0) -> Costs:
    return Costs((factor * (1 + context / 100), factor) * LAYERS, 0.5, (factor * 10, factor * 12 + context / 100), context / 1000, 0.25)


def test_between_two_contexts_it_is_linear_and_outside_of_them_that_of_the_nearest() -> None:
    both = LatencyTable((Measured(100, made_up(100), 0.0), Measured(300, made_up(300), 0.0)))
    assert both.at(200) == made_up(200)
    assert both.at(100) == both.at(7) == made_up(100)
    assert both.at(999) == made_up(300)


def test_it_is_measured_once_for_a_model_and_read_after_that(measured: list[tuple[int, int]], folder: Path) -> None:
    model, _ = small_world()
    steps: list[tuple[int, int]] = []
    first = latency_table(model, 4, [50, 10, 30, 10], lambda done, total: steps.append((done, total)))
    assert measured == [(4, 10), (4, 30), (4, 50)]
    assert steps == [(0, 3), (1, 3), (2, 3)]
    assert len(first.errors) == CHECKED_MASKS
    assert not first.kept
    again = latency_table(model, 4, [10, 30, 50])
    assert (again.measured, again.kept) == (first.measured, True)
    assert measured[3:] == [(0, 10)], "one plain pass tells whether the machine is as fast as it was"
    assert len(list(folder.iterdir())) == 1


def test_on_a_machine_that_became_slower_it_is_measured_again(measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small_world()
    latency_table(model, 4, [10])
    monkeypatch.setattr(table, "measure", lambda m, d, context, repeats=3, masks=(): Measured(context, made_up(context, 1.3), 0.0, (0.0,)))
    monkeypatch.setattr(table, "plain_seconds", lambda m, context: made_up(context, 1.3).verify[0])
    again = latency_table(model, 4, [10])
    assert not again.kept
    assert again.at(10) == made_up(10, 1.3)


@pytest.mark.parametrize("left_behind", [b"", b"{", b"[]", b'[{"context": 3}]', b"\xff\x00"])
def test_a_file_that_is_none_is_measured_over(left_behind: bytes, measured: list[tuple[int, int]], folder: Path) -> None:
    model, _ = small_world()
    latency_table(model, 4, [10])
    kept, = folder.iterdir()
    kept.write_bytes(left_behind)
    assert not latency_table(model, 4, [10]).kept
    assert latency_table(model, 4, [10]).kept


@pytest.mark.usefixtures("measured")
def test_a_folder_that_cannot_be_written_to_keeps_nothing_and_stops_nobody(folder: Path) -> None:
    folder.write_text("a file in its place")
    assert not latency_table(small_world()[0], 4, [10]).kept


def test_another_model_engine_or_table_has_a_file_of_its_own() -> None:
    model, _ = small_world()
    names = {fingerprint(model, 4, [10]), fingerprint(model, 5, [10]), fingerprint(model, 4, [10, 20])}
    spec = model.spec
    for changes in ({"weights_sha256": "f" * 64}, {"engine": "other"}, {"id": "other"}, {"quantization": "torchao-8bit"}):
        other = type("Other", (), {"spec": replace(spec, **changes)})()
        names.add(fingerprint(other, 4, [10]))
    assert len(names) == 7


def test_a_real_one_says_what_it_is_worth() -> None:
    found = latency_table(small_world()[0], 2, [8, 24])
    assert [m.context for m in found.measured] == [8, 24]
    assert "foretells a draft step to" in str(found)
    assert found.at(16).verify[0] > 0
