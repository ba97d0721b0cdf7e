"""Drafting against plain decoding as a batch grows: its figures, and those that a profile keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.profiles import GOLDEN
from helpers.tiny import LAYERS, tiny_model_and_reference

from skipsearch.bench import BenchRequest, add_batch_speedups, batch_sizes, run_batch_benchmark
from skipsearch.bench.systems import SkipsearchSystem
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats, Estimate
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.profile import load_profile

REQUESTS = [
    BenchRequest((5, 17, 40), 12),
    BenchRequest((60, 2), 9),
    BenchRequest((33, 34, 1, 8), 12),
]


def systems() -> list[SkipsearchSystem]:
    model, _ = tiny_model_and_reference()
    return [
        SkipsearchSystem("plain", Decoder(model)),
        SkipsearchSystem(
            "profile",
            Decoder(
                model, SkipMask(LAYERS, (1,), (2,)), draft_length=3, exit_policy=make_exit("fixed")
            ),
        ),
    ]


def test_every_size_is_decoded_by_every_system_on_the_same_requests() -> None:
    asked: list[int] = []
    rows = run_batch_benchmark(
        systems(), REQUESTS, [1, 2, 4], progress=lambda done, total: asked.append(total)
    )
    assert asked == [6] * 6  # groups: three of one, two of two, one of four
    assert [(row.requests, row.system) for row in rows] == [
        (n, name) for n in (1, 2, 4) for name in ("plain", "profile")
    ]
    assert [row.prompts for row in rows] == [3, 3, 4, 4, 4, 4], (
        "the first requests fill the last group up"
    )
    assert all(row.identical == row.prompts for row in rows)
    assert [row.speedup.mean for row in rows if row.system == "plain"] == [1.0] * 3
    assert rows[0].against_one == 1.0
    assert all(row.tau == 1.0 for row in rows if row.system == "plain")
    assert all((row.tau or 0) > 1.3 for row in rows if row.system == "profile")


def test_ratios_are_of_seconds_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(system: SkipsearchSystem, group: list[BenchRequest], new_tokens: int) -> Any:
        pace = {"plain": 4.0, "profile": 3.0 if len(group) < 4 else 5.0}[system.name] / len(group)
        return batch_sizes._GroupRun(
            pace * len(group) * new_tokens,
            len(group) * new_tokens,
            [[1]] * len(group),
            DecodeStats(),
        )

    monkeypatch.setattr(batch_sizes, "_run_group", run)
    rows = {
        (row.requests, row.system): row for row in run_batch_benchmark(systems(), REQUESTS, [1, 4])
    }
    assert rows[1, "profile"].speedup.mean == pytest.approx(4 / 3)
    assert rows[4, "profile"].speedup.mean == pytest.approx(4 / 5)
    assert rows[4, "plain"].against_one == pytest.approx(4)
    assert rows[4, "plain"].tokens_per_second == pytest.approx(1.0)


def test_a_profile_keeps_its_own_speedups_and_no_others() -> None:
    rows = run_batch_benchmark(systems(), REQUESTS[:1], [2, 1])
    rows = [replace(row, speedup=Estimate(1 / row.requests, 0.4, 1.1)) for row in rows]
    kept = add_batch_speedups(load_profile(GOLDEN / "v3_speculate.yaml"), rows, "profile")
    assert kept.measured is not None
    assert [(row.requests, row.speedup.mean) for row in kept.measured.by_batch] == [
        (1, 1.0),
        (2, 0.5),
    ]
    assert kept.plain_from_batch == 1
