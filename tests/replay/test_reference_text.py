"""The reference text is written once: a search that was killed, or the next one, reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import tiny_model_and_reference

from skipsearch.engine.sampler import SamplingParams
from skipsearch.models import ModelAdapter
from skipsearch.replay import reference_text
from skipsearch.replay.generate_together import Continuation, generate_continuations
from skipsearch.replay.reference_text import TextSettings, TextStore, write_reference_text

PROMPTS = [[i + 1, 2 * i + 3, 7] for i in range(20)]
SETTINGS = TextSettings(12, None)


class Model:
    """A model from files, whose store has a name."""

    def __init__(self, weights_sha256: str | None = "ab" * 32) -> None:
        model, _ = tiny_model_and_reference()
        self.adapter = model
        model_spec = replace(model.spec, weights_sha256=weights_sha256)
        self.spec = model_spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """The prompts that were continued, in order."""
    prompts = list[Sequence[int]]()

    def count(
        model: ModelAdapter, wave: Sequence[Sequence[int]], *rest: Any, **options: Any
    ) -> Any:
        prompts.extend(wave)
        return generate_continuations(model, wave, *rest, **options)

    monkeypatch.setattr(reference_text, "generate_continuations", count)
    return prompts


def write(
    store: TextStore | None, limit_s: float | None = None, n: int = 20, min_texts: int = 16
) -> list[Continuation]:
    model, _ = tiny_model_and_reference()
    return write_reference_text(
        model, PROMPTS[:n], SETTINGS, store=store, limit_s=limit_s, min_texts=min_texts
    )


def tokens(continuations: list[Continuation]) -> list[list[int]]:
    return [one.tokens for one in continuations]


def test_a_text_is_written_once(tmp_path: Path, written: list[Sequence[int]]) -> None:
    first = write(TextStore(tmp_path / "texts" / "a.jsonl"), n=16)
    assert written == PROMPTS[:16]
    again = write(TextStore(tmp_path / "texts" / "a.jsonl"))
    assert written[16:] == PROMPTS[16:], "only what is new"
    assert tokens(again)[:16] == tokens(first)
    assert tokens(again) == tokens(write(None))


def test_a_stored_text_is_not_written_again_with_what_comes_before_it(
    tmp_path: Path, written: list[Sequence[int]]
) -> None:
    path = tmp_path / "a.jsonl"
    expected = tokens(write(TextStore(path)))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for i, line in enumerate(lines) if i not in (2, 5)))
    written.clear()
    assert tokens(write(TextStore(path))) == expected
    assert len(written) == 2


def test_a_killed_process_loses_no_finished_wave(
    tmp_path: Path, written: list[Sequence[int]]
) -> None:
    path = tmp_path / "a.jsonl"
    expected = tokens(write(TextStore(path)))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    written.clear()
    assert tokens(write(TextStore(path))) == expected
    assert written == PROMPTS[-1:], "the half line is written again"
    written.clear()
    assert tokens(write(TextStore(path))) == expected
    assert not written


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        '{"prompt": "x"}',
        '{"prompt": "x", "tokens": ["a"], "seconds": 1}',
        '{"prompt": "x", "tokens": [1]}',
        '{"tokens": [1], "seconds": 1}',
        "\x00",
    ],
    ids=["cut", "list", "null", "no tokens", "no numbers", "no time", "no prompt", "binary"],
)
def test_damaged_lines_are_not_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    expected = tokens(write(TextStore(path)))
    path.write_text(line + "\n" + path.read_text() + line)
    assert tokens(write(TextStore(path))) == expected


def test_after_the_limit_no_wave_begins_but_enough_texts_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reference_text, "prompts_per_pass", lambda model: 3)
    store = TextStore(tmp_path / "a.jsonl")
    assert len(write(None, limit_s=-1, min_texts=2)) == 2
    assert len(write(store, limit_s=-1, min_texts=5)) == 6
    assert len(write(store, limit_s=60)) == 20
    assert len(write(TextStore(tmp_path / "a.jsonl"), limit_s=-1)) == 20, "stored texts are used"


def test_the_time_of_stored_texts_counts_so_that_the_next_search_has_the_same(
    tmp_path: Path,
) -> None:
    store = TextStore(tmp_path / "a.jsonl")
    for i, text in enumerate(tokens(write(None, n=16))):
        store.add([PROMPTS[i]], [text], i, seconds=3.0)
    assert len(write(TextStore(store.path), limit_s=45)) == 16
    assert len(write(TextStore(store.path), limit_s=71)) == 16, "a wave of 48 s would end too late"
    assert len(write(TextStore(store.path), limit_s=73)) == 20


def test_texts_of_another_model_or_setting_are_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))

    def path(model: Model, settings: TextSettings = SETTINGS) -> Path:
        store = TextStore.open_for(model, settings)  # type: ignore[arg-type]
        assert store is not None
        return store.path

    model = Model()
    others = [
        path(Model("cd" * 32)),
        *(
            path(model, settings)
            for settings in (
                TextSettings(13, None),
                TextSettings(12, 6),
                TextSettings(12, "loop"),
                TextSettings(12, None, SamplingParams(0.7)),
            )
        ),
    ]
    monkeypatch.setattr(reference_text, "software_versions", lambda: {"skipsearch": "9.9"})
    others.append(path(model))
    monkeypatch.undo()
    monkeypatch.setenv("SKIPSEARCH_CACHE_DIR", str(tmp_path))
    assert len({path(model), *others}) == 1 + len(others)
    assert path(Model()) == path(model)
    assert TextStore.open_for(Model(None), SETTINGS) is None  # type: ignore[arg-type]


def test_a_sampled_text_depends_on_its_seed(tmp_path: Path) -> None:
    for sampled in (True, False):
        store = TextStore(tmp_path / f"{sampled}.jsonl", sampled)
        store.add([[1, 2]], [[3, 4]], seed=5, seconds=1.5)
        again = TextStore(store.path, sampled)
        assert again.get([1, 2], 5) == ([3, 4], 1.5)
        assert again.get([1, 2], 6) == (None if sampled else ([3, 4], 1.5))
