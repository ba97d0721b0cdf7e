"""The figures of a benchmark: how they are computed, and that all systems did the same work."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from mmap import PAGESIZE, mmap
from typing import Any

import pytest
import torch
from helpers.tiny import LAYERS, tiny_model_and_reference, use_engine

from skipsearch.bench import (
    BenchRequest,
    DrafterRow,
    make_random_requests,
    measure_cost_table,
    run_benchmark,
)
from skipsearch.bench.bench_prompts import spec_bench_category
from skipsearch.bench.peak_memory import measure_peak_memory
from skipsearch.bench.systems import SkipsearchSystem, SystemRun
from skipsearch.cli.bench_options import balance_categories
from skipsearch.cli.bench_view import print_rows
from skipsearch.cli.terminal import Terminal
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats
from skipsearch.decoding import Decoder
from skipsearch.drafters.exits import make_exit
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.skip.spec import Skip
from skipsearch.models import load_adapter
from skipsearch.tasks import Prompt

REQUESTS = [
    BenchRequest((5, 17, 40), 12, "a"),
    BenchRequest((60, 2), 9, "b"),
    BenchRequest((33, 34, 1, 8), 12, "a"),
]


class Fake:
    """A system that takes a given time."""

    def __init__(self, name: str, seconds_per_token: float):
        self.name, self.pace = name, seconds_per_token
        self.counts: dict[str, Any] = {}  # further fields of its stats
        self.model = tiny_model_and_reference()[0]
        self.engine = self.model.spec.engine
        self.calls: list[tuple[int, int]] = []

    def run(self, prompt: Sequence[int], new_tokens: int) -> SystemRun:
        self.calls.append((len(prompt), new_tokens))
        behind = new_tokens - 1
        return SystemRun(
            [1] * new_tokens,
            0.5,
            self.pace * behind,
            DecodeStats(
                rounds=behind, round_tokens=behind, decode_seconds=self.pace * behind, **self.counts
            ),
        )


def drafting_system() -> SkipsearchSystem:
    model, _ = tiny_model_and_reference()
    return SkipsearchSystem(
        "profile",
        Decoder(
            model, SkipMask(LAYERS, (1,), (2,)), draft_length=3, exit_policy=make_exit("fixed")
        ),
    )


def test_ratios_are_of_total_times_over_the_same_prompts() -> None:
    slow, fast = run_benchmark([Fake("plain", 0.004), Fake("profile", 0.002)], REQUESTS, repeats=2)
    assert slow.speedup.mean == pytest.approx(1.0)
    assert fast.speedup.mean == pytest.approx(2.0)
    assert (fast.ms_per_token, fast.tokens_per_second) == pytest.approx((2.0, 500.0))
    assert {group: estimate.mean for group, estimate in fast.by_group.items()} == pytest.approx(
        {"a": 2.0, "b": 2.0}
    )
    assert fast.end_to_end_tokens_per_second == pytest.approx(33 / (1.5 + 0.002 * 30))


def test_the_ratio_of_two_rows_milliseconds_is_the_speedup() -> None:
    class SlowOnLongPrompts(Fake):
        def run(self, prompt: Sequence[int], new_tokens: int) -> SystemRun:
            run = super().run(prompt, new_tokens)
            return replace(run, decode_s=run.decode_s * len(prompt))

    plain, drafted = run_benchmark(
        [Fake("plain", 0.004), SlowOnLongPrompts("profile", 0.002)], REQUESTS, repeats=1
    )
    assert plain.ms_per_token / drafted.ms_per_token == pytest.approx(drafted.speedup.mean)


def test_every_system_gets_every_request_in_every_repeat_and_turns_are_taken() -> None:
    systems = [Fake("plain", 0.004), Fake("profile", 0.002)]
    run_benchmark(systems, REQUESTS, repeats=2)
    asked = [(len(r.prompt_ids), r.new_tokens) for r in REQUESTS]
    for system in systems:
        assert system.calls[2:-1] == asked * 2  # after two warm-ups; then a run measures memory


def test_contexts_are_filled_with_the_prompts_own_text_and_those_too_long_left_out() -> None:
    system = Fake("plain", 0.004)
    (row,) = run_benchmark([system], REQUESTS, repeats=3, contexts=[16, 64, 100_000])
    assert set(row.by_context) == {16, 64}
    assert row.by_context[64] == pytest.approx(4.0)
    assert system.calls.count((64, 32)) == 3


def test_our_systems_know_their_rounds() -> None:
    model, _ = tiny_model_and_reference()
    plain, drafted = run_benchmark(
        [SkipsearchSystem("plain", Decoder(model)), drafting_system()], REQUESTS, repeats=1
    )
    assert (plain.tau, plain.alpha, plain.beta) == (1.0, None, None)
    assert drafted.identical == drafted.prompts == 3
    assert drafted.tau is not None
    assert 1 < drafted.tau < 4
    assert drafted.beta is not None
    assert drafted.verify_ratio is not None
    assert drafted.accepted_fraction is not None
    assert drafted.alpha is not None


def test_beta_and_v_are_times_of_the_decoder_over_those_of_plain_decoding_on_its_engine() -> None:
    plain, profile = Fake("plain", 0.004), Fake("profile", 0.002)
    with use_engine("lean"):
        other = Fake("profile@lean", 0.002)
    for system in (profile, other):
        system.counts = {"drafted": 5, "draft_seconds": 0.01, "verify_seconds": 0.05}
    plain_row, row, alone = run_benchmark([plain, profile, other], [REQUESTS[0]], repeats=2)
    assert (row.beta, row.verify_ratio) == pytest.approx((0.002 / 0.004, 0.05 / 11 / 0.004))
    assert (plain_row.beta, plain_row.verify_ratio) == (None, None), "nothing was drafted"
    assert (alone.beta, alone.verify_ratio) == (None, None), "no plain system has its engine"


def test_each_drafter_of_a_recipe_has_its_own_figures() -> None:
    model, _ = tiny_model_and_reference()
    recipe = Recipe(
        (
            Lookup(min_match=1, draft_length=4),
            Skip(attn=(1,), mlp=(2,), draft_length=3, exit=make_exit("fixed")),
        )
    )
    plain, both = run_benchmark(
        [
            SkipsearchSystem("plain", Decoder(model)),
            SkipsearchSystem("recipe", Decoder(model, recipe)),
        ],
        [BenchRequest((5, 17, 40, 5, 17), 40), BenchRequest((1, 2, 1), 40)],
        repeats=1,
    )
    assert plain.by_drafter == []
    assert [row.kind for row in both.by_drafter] == ["lookup", "skip"]
    assert all(row.drafted >= row.accepted >= 0 < row.rounds for row in both.by_drafter)
    assert sum(row.share for row in both.by_drafter) <= 1
    assert both.accepted_fraction == sum(row.accepted for row in both.by_drafter) / sum(
        row.drafted for row in both.by_drafter
    )
    assert both.as_dict()["by_drafter"][0]["kind"] == "lookup", "as --json prints it"


def test_drafters_are_shown_where_a_recipe_has_several(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run_benchmark([Fake("plain", 0.004)], REQUESTS, repeats=1)
    one, other = (
        DrafterRow("lookup", 0.25, 5, 20, 10, 0.8, 4, [0.75, 0.5]),
        DrafterRow("skip", 0.5, 10, 30, 24, 0.9, 0, []),
    )
    print_rows(Terminal(width=160), [replace(row, system="alone", by_drafter=[one])])
    assert "of rounds" not in capsys.readouterr().out
    print_rows(Terminal(width=160), [row, replace(row, system="recipe", by_drafter=[one, other])])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["recipe", "lookup", "25", "%", "20", "0.80", "50", "%", "40", "%"] in shown
    assert ["skip", "50", "%", "30", "0.90", "80", "%"] in shown
    assert ["recipe,", "lookup", "0.75", "0.50"] in shown


def test_what_a_token_reads_is_every_matrix_once_and_one_row_of_the_embedding() -> None:
    for engine in ("hf", "lean"):
        with use_engine(engine):
            model, full = tiny_model_and_reference()
            table = full.hf.model.embed_tokens.weight
            weights = sum(w.nbytes for w in full.hf.parameters())
            assert model.weight_bytes == weights
            assert model.read_bytes == weights - table.nbytes


def test_bfloat16_weights_of_a_tied_model_are_counted_once() -> None:
    sizes = {
        engine: load_adapter("demo", device="cpu", dtype="bfloat16", engine=engine).weight_bytes
        for engine in ("hf", "lean")
    }
    assert sizes["hf"] == sizes["lean"] == 9_641_664 * 2


def written(size: int = 64_000_000) -> mmap:
    """Map new memory and write to it, whatever memory the allocator kept of earlier tests."""
    memory = mmap(-1, size)
    for page in range(0, size, PAGESIZE):
        memory[page] = 1
    return memory


def test_memory_of_a_run_is_seen_whatever_garbage_was_there_before() -> None:
    def takes_64_megabytes() -> None:
        gc.collect()
        written()

    garbage: list[object] = [written()]
    garbage.append(garbage)  # only a collection frees it
    del garbage
    peak = measure_peak_memory(takes_64_megabytes, torch.device("cpu"))
    if peak is None:
        pytest.skip("this system does not tell")
    assert peak > 50e6


def test_the_cost_table_is_relative_to_a_pass_of_its_own_engine() -> None:
    (row,) = measure_cost_table([tiny_model_and_reference()[0]], 16)
    assert len(row.v) == 15
    assert 0 < row.beta_half < 1.5
    assert row.engine == "hf"


def test_random_requests_are_the_same_every_time_and_of_the_models_vocabulary() -> None:
    model = load_adapter("synthetic:2x64", device="cpu")
    a, b = make_random_requests(model, 3), make_random_requests(model, 3)
    assert a == b
    assert all(0 <= t < model.spec.vocab_size for r in a for t in r.prompt_ids)


def test_spec_benchs_columns_hold_the_categories_of_mt_bench_as_one() -> None:
    assert {spec_bench_category(c) for c in ("writing", "stem", "math")} == {"conversation"}
    assert [spec_bench_category(c) for c in ("math_reasoning", "rag", "")] == [
        "math_reasoning",
        "rag",
        "",
    ]


def test_a_few_prompts_are_of_every_category() -> None:
    prompts = [
        Prompt(str(i), "x", category)
        for i, category in enumerate(["qa"] * 5 + ["rag"] * 2 + ["math"])
    ]
    assert [p.category for p in balance_categories(prompts, 5)] == [
        "qa",
        "rag",
        "math",
        "qa",
        "rag",
    ]
    assert len(balance_categories(prompts, 100)) == len(prompts)
    plain = [Prompt(str(i), "x") for i in range(4)]
    assert balance_categories(plain, 3) == plain[:3]
