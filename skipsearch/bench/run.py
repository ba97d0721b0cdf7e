"""The run itself: every peer on every prompt in turn, the order rotating, after a warm-up; medians and paired ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from skipsearch.bench.peers import Peer, Run
from skipsearch.decoding import Decoder
from skipsearch.evaluation.prompts import Workload
from skipsearch.models.spec import ModelAdapter
from skipsearch.stats import DecodeStats, Estimate, bootstrap_ratio


@dataclass(frozen=True)
class BenchRow:
    """Times in milliseconds; speedup over the first peer, paired by prompt, with its 95 % interval. Shares are None for other engines."""

    peer: str
    ms_per_token: float
    ms_per_token_quartiles: tuple[float, float]
    first_token_ms: float
    end_to_end_tokens_per_second: float
    speedup: Estimate
    identical: int
    prompts: int
    tau: float | None
    alpha: float | None
    accepted_fraction: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench(model: ModelAdapter, peers: Sequence[Peer], workload: Workload, repeats: int = 3,
          progress: Callable[[int, int], None] = lambda done, total: None) -> list[BenchRow]:
    """Greedy decoding of each prompt, as long as the task lets it run (the full model decides, once), by every peer."""
    plain = Decoder(model)
    lengths = [max(2, len(workload.generate(plain, p, 0).tokens)) for p in range(len(workload.prompts))]
    for peer in peers:
        peer.run(workload.prompts[0], 8)  # warm-up
    runs: dict[str, list[list[Run]]] = {peer.name: [[] for _ in lengths] for peer in peers}
    total, done = repeats * len(lengths), 0
    for repeat in range(repeats):
        for p, length in enumerate(lengths):
            shift = (p + repeat) % len(peers)
            for peer in [*peers[shift:], *peers[:shift]]:
                runs[peer.name][p].append(peer.run(workload.prompts[p], length))
            done += 1
            progress(done, total)
    return [_row(peer.name, runs[peer.name], runs[peers[0].name]) for peer in peers]


def _row(name: str, ours: list[list[Run]], first: list[list[Run]]) -> BenchRow:
    pace = sorted(1e3 * r.decode / (len(r.tokens) - 1) for rs in ours for r in rs)
    stats = sum((r.stats for rs in ours for r in rs if r.stats), DecodeStats())
    theirs, mine = [[median(r.decode for r in rs) for rs in side] for side in (first, ours)]
    whole = sum(r.first_token + r.decode for rs in ours for r in rs)
    return BenchRow(
        peer=name, ms_per_token=median(pace), ms_per_token_quartiles=(pace[len(pace) // 4], pace[3 * len(pace) // 4]),
        first_token_ms=1e3 * median(r.first_token for rs in ours for r in rs),
        end_to_end_tokens_per_second=sum(len(r.tokens) for rs in ours for r in rs) / whole,
        speedup=bootstrap_ratio(theirs, mine), identical=sum(a[0].tokens == b[0].tokens for a, b in zip(ours, first, strict=True)),
        prompts=len(ours), tau=stats.tau, alpha=stats.alpha, accepted_fraction=stats.accepted_fraction)
