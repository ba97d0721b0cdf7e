"""`skipsearch list`: every drafter and exit policy of profiles, with its description."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers.command import run_in_process

from skipsearch.core.recipe import DRAFTERS, EXITS
from skipsearch.models.families.table import FAMILIES


@pytest.mark.parametrize(("what", "table"), [("drafters", DRAFTERS), ("exits", EXITS)])
def test_each_is_listed_with_the_first_line_of_its_docstring(
    what: str, table: dict[str, str], capsys: Any, monkeypatch: Any
) -> None:
    status, printed, _ = run_in_process(capsys, monkeypatch, "list", what, "--json")
    listed = json.loads(printed)
    assert (status, listed.keys()) == (0, table.keys())
    listed = {
        name: said["what it does"] if what == "drafters" else said for name, said in listed.items()
    }
    for name, said in listed.items():
        doc = str(import_module(table[name].partition(":")[0]).__doc__)
        assert f"`{name}`: {said}" == doc.splitlines()[0]
        assert said.endswith(".")
    _, shown, _ = run_in_process(capsys, monkeypatch, "list", what)
    for name, said in listed.items():
        assert name in shown
        assert said.split()[0] in shown


def test_drafters_say_who_described_them_what_they_need_and_what_they_go_with(
    capsys: Any, monkeypatch: Any
) -> None:
    _, printed, _ = run_in_process(capsys, monkeypatch, "list", "drafters", "--json")
    listed = json.loads(printed)
    assert all(all(said.values()) for said in listed.values())
    assert "prefill" in listed["asd"]["needs"]
    assert "stream" in listed["swift"]["needs"]
    assert "train kangaroo" in listed["kangaroo"]["needs"]
    assert "siblings" in listed["skip"]["goes with"]
    assert len({said["source"] for said in listed.values()}) == len(DRAFTERS)


def test_models_are_listed_with_the_families_that_have_a_row(capsys: Any, monkeypatch: Any) -> None:
    status, printed, _ = run_in_process(capsys, monkeypatch, "list", "models", "--json")
    listed = json.loads(printed)
    assert status == 0
    assert listed["vicuna-7b"] == "lmsys/vicuna-7b-v1.5"
    assert all(family in listed["org/name, or a folder"] for family in FAMILIES)


def test_stored_weights_are_listed_and_removed(
    capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    entry = tmp_path / "weights" / "tiny@0123.panels"
    entry.parent.mkdir()
    entry.write_bytes(bytes(20_000_000))
    _, printed, _ = run_in_process(capsys, monkeypatch, "list", "models", "--json")
    assert "tiny, 0.02 GB" in json.loads(printed)[str(entry)]
    status, printed, _ = run_in_process(capsys, monkeypatch, "list", "models", "--remove")
    assert (status, entry.exists()) == (0, False)
    assert "0.02 GB" in printed
    status, _, error = run_in_process(capsys, monkeypatch, "list", "tasks", "--remove")
    assert status == 2
    assert "tasks" in error
