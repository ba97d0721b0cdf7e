"""Measure drafting against plain decoding as the batch size grows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from skipsearch import decoding
from skipsearch.bench.bench_prompts import BenchRequest
from skipsearch.bench.benchmark import BenchProgress
from skipsearch.bench.systems import SkipsearchSystem
from skipsearch.core.machine import synchronize
from skipsearch.core.schema_types import Interval
from skipsearch.core.stats import DecodeStats, Estimate, estimate_ratio
from skipsearch.decoding import Batch
from skipsearch.profile import Profile
from skipsearch.profile.schema import BatchSpeed


@dataclass(frozen=True)
class BatchRow:
    """The result of one system at one batch size.

    tokens_per_second: of all requests together, without the first token of each.
    speedup: over the first system at the same size, paired by group of requests, with its 95 %
    interval.
    against_one: tokens_per_second over that of the first system at the first size.
    identical: number of requests whose tokens equal those of the first system at this size.
    """

    requests: int
    system: str
    engine: str
    tokens_per_second: float
    speedup: Estimate
    against_one: float
    identical: int
    prompts: int
    tau: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _GroupRun:
    """One timed run of a group of requests.

    seconds: decode time, from the moment at which every request has its first token.
    """

    seconds: float
    n_tokens: int
    texts: list[list[int]]
    stats: DecodeStats


def run_batch_benchmark(
    systems: Sequence[SkipsearchSystem],
    requests: Sequence[BenchRequest],
    sizes: Sequence[int],
    repeats: int = 1,
    progress: BenchProgress = lambda done, total: None,
) -> list[BatchRow]:
    """Decode the requests greedily at each batch size, with every system in turn.

    All requests of a group generate the same number of tokens, so plain decoding keeps the batch
    full to the end. If there are too few requests for the last group, it repeats the first ones.
    """
    groups = {size: _group_requests(requests, size) for size in sizes}
    total, done = repeats * sum(len(group_list) for group_list in groups.values()), 0
    rows: list[BatchRow] = []
    for size in sizes:
        runs: dict[str, list[list[_GroupRun]]] = {
            system.name: [[] for _ in groups[size]] for system in systems
        }
        for system in systems:
            _run_group(system, groups[size][0], 8)  # warm-up
        for repeat in range(repeats):
            for number, group in enumerate(groups[size]):
                shift = (number + repeat) % len(systems)
                for system in [*systems[shift:], *systems[:shift]]:
                    runs[system.name][number].append(
                        _run_group(system, group, max(2, sum(r.new_tokens for r in group) // size))
                    )
                progress(done := done + 1, total)
        rows += [
            _make_batch_row(size, system, runs[system.name], runs[systems[0].name], rows)
            for system in systems
        ]
    return rows


def add_batch_speedups(profile: Profile, rows: Sequence[BatchRow], system: str) -> Profile:
    """Return a copy of a measured profile, with speedups by batch size.

    system: the system in `rows` whose speedups are taken.
    """
    assert profile.measured is not None
    by_batch = tuple(
        BatchSpeed(
            requests=row.requests,
            speedup=Interval.from_rounded(row.speedup.mean, row.speedup.low, row.speedup.high),
        )
        for row in sorted(rows, key=lambda row: row.requests)
        if row.system == system
    )
    return profile.model_copy(
        update={"measured": profile.measured.model_copy(update={"by_batch": by_batch})}
    )


def _group_requests(requests: Sequence[BenchRequest], size: int) -> list[list[BenchRequest]]:
    count = -(-len(requests) // size)
    return [
        [requests[(group * size + i) % len(requests)] for i in range(size)]
        for group in range(count)
    ]


def _run_group(
    system: SkipsearchSystem, group: Sequence[BenchRequest], new_tokens: int
) -> _GroupRun:
    texts: list[list[int]] = [[] for _ in group]
    stats, device = DecodeStats(), system.model.spec.device
    # `new_batch` would stop drafting at the batch size that the profile names; this does not.
    with closing(Batch(system.decoder.loop, len(group))) as batch:
        rows = {
            batch.join(decoding.Request(request.prompt_ids, new_tokens, ignore_eos=True)): i
            for i, request in enumerate(group)
        }
        started = perf_counter()
        while batch.running:
            for row in batch.run_round():
                if row.error is not None:
                    raise row.error
                if row.chunk is not None:
                    texts[rows[row]] += row.chunk.tokens
                    stats += row.chunk.stats or DecodeStats()
            if all(len(text) == 1 for text in texts):  # all prefills are done
                synchronize(device)
                started = perf_counter()
    synchronize(device)
    return _GroupRun(perf_counter() - started, sum(len(text) - 1 for text in texts), texts, stats)


def _make_batch_row(
    size: int,
    system: SkipsearchSystem,
    runs: list[list[_GroupRun]],
    baseline: list[list[_GroupRun]],
    earlier_rows: Sequence[BatchRow],
) -> BatchRow:
    ours, theirs = (
        [sum(run.seconds / run.n_tokens for run in repeats) for repeats in groups]
        for groups in (runs, baseline)
    )
    all_runs = [run for repeats in runs for run in repeats]
    pace = sum(run.n_tokens for run in all_runs) / sum(run.seconds for run in all_runs)
    stats = sum((run.stats for run in all_runs), DecodeStats())
    texts = [
        (a, b)
        for mine, other in zip(runs, baseline, strict=True)
        for a, b in zip(mine[0].texts, other[0].texts, strict=True)
    ]
    return BatchRow(
        size,
        system.name,
        system.model.spec.engine,
        pace,
        estimate_ratio(theirs, ours),
        pace / earlier_rows[0].tokens_per_second if earlier_rows else 1.0,
        sum(a == b for a, b in texts),
        len(texts),
        stats.tau,
    )
