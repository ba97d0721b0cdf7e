"""Requests side by side: how drafting fares against plain decoding as a batch grows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from skipsearch import decoding
from skipsearch.bench.peers import OurPeer
from skipsearch.bench.requests import Request
from skipsearch.bench.run import Progress
from skipsearch.decoding import Batch
from skipsearch.fields import Interval
from skipsearch.machine import synchronise
from skipsearch.profile import Profile
from skipsearch.profile.schema import BatchSpeed
from skipsearch.stats import DecodeStats, Estimate, bootstrap_ratio


@dataclass(frozen=True)
class BatchRow:
    """One peer with so many requests side by side. tokens_per_second: of all of them together, behind each one's first token.

    speedup: over the first peer at this size, paired by group of requests, with its 95 % interval. against_one: tokens a second over those
    of the first peer at the first size. identical: requests whose tokens are those that the first peer gives them at this size.
    """

    requests: int
    peer: str
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
class _Run:
    """One group of requests. seconds: from where all have their first token."""

    seconds: float
    tokens: int
    texts: list[list[int]]
    stats: DecodeStats


def batches(peers: Sequence[OurPeer], requests: Sequence[Request], sizes: Sequence[int], repeats: int = 1,
            progress: Progress = lambda done, total: None) -> list[BatchRow]:
    """Greedy decoding of the requests in groups of each size, every peer in turn; the rows of a group write the same number of tokens, so
    that the batch stays full for as long as plain decoding lasts. A size that is larger than the requests are takes some of them again.
    """
    groups = {size: _groups(requests, size) for size in sizes}
    total, done = repeats * sum(len(found) for found in groups.values()), 0
    rows: list[BatchRow] = []
    for size in sizes:
        runs: dict[str, list[list[_Run]]] = {peer.name: [[] for _ in groups[size]] for peer in peers}
        for peer in peers:
            _run(peer, groups[size][0], 8)   # kernels are chosen, pages touched
        for repeat in range(repeats):
            for number, group in enumerate(groups[size]):
                shift = (number + repeat) % len(peers)
                for peer in [*peers[shift:], *peers[:shift]]:
                    runs[peer.name][number].append(_run(peer, group, max(2, sum(r.new_tokens for r in group) // size)))
                progress(done := done + 1, total)
        rows += [_row(size, peer, runs[peer.name], runs[peers[0].name], rows) for peer in peers]
    return rows


def with_batches(profile: Profile, rows: Sequence[BatchRow], peer: str) -> Profile:
    """The profile with what this peer showed. It has been measured."""
    assert profile.measured is not None
    found = tuple(BatchSpeed(requests=row.requests, speedup=Interval.rounded(row.speedup.mean, row.speedup.low, row.speedup.high))
                  for row in sorted(rows, key=lambda row: row.requests) if row.peer == peer)
    return profile.model_copy(update={"measured": profile.measured.model_copy(update={"by_batch": found})})


def _groups(requests: Sequence[Request], size: int) -> list[list[Request]]:
    count = -(-len(requests) // size)
    return [[requests[(group * size + i) % len(requests)] for i in range(size)] for group in range(count)]


def _run(peer: OurPeer, group: Sequence[Request], new_tokens: int) -> _Run:
    texts: list[list[int]] = [[] for _ in group]
    stats, device = DecodeStats(), peer.model.spec.device
    with closing(Batch(peer.decoder, len(group))) as batch:   # which drafts whatever a profile says of its size
        rows = {batch.join(decoding.Request(request.prompt, new_tokens, ignore_eos=True)): i for i, request in enumerate(group)}
        started = perf_counter()
        while batch.rows:
            for row in batch.step():
                if row.error is not None:
                    raise row.error
                if row.chunk is not None:
                    texts[rows[row]] += row.chunk.tokens
                    stats += row.chunk.stats or DecodeStats()
            if all(len(text) == 1 for text in texts):   # the prompts are read
                synchronise(device)
                started = perf_counter()
    synchronise(device)
    return _Run(perf_counter() - started, sum(len(text) - 1 for text in texts), texts, stats)


def _row(size: int, peer: OurPeer, runs: list[list[_Run]], first: list[list[_Run]], above: Sequence[BatchRow]) -> BatchRow:
    ours, theirs = ([sum(run.seconds / run.tokens for run in found) for found in groups] for groups in (runs, first))
    pace = sum(run.tokens for found in runs for run in found) / sum(run.seconds for found in runs for run in found)
    stats = sum((run.stats for found in runs for run in found), DecodeStats())
    texts = [(a, b) for mine, other in zip(runs, first, strict=True) for a, b in zip(mine[0].texts, other[0].texts, strict=True)]
    return BatchRow(size, peer.name, peer.model.spec.engine, pace, bootstrap_ratio(theirs, ours),
                    pace / above[0].tokens_per_second if above else 1.0, sum(a == b for a, b in texts), len(texts), stats.tau)
