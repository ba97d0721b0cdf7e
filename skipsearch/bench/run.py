"""The run itself: every peer on every prompt in turn, the order rotating, after a warm-up; medians and paired ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from skipsearch.bench.memory import bytes_read, peak_of, read_bandwidth
from skipsearch.bench.passes import PassTimes, pass_times
from skipsearch.bench.peers import OurPeer, Peer, Run
from skipsearch.bench.requests import Request
from skipsearch.exits.fixed import Fixed
from skipsearch.stats import DecodeStats, Estimate, bootstrap_ratio, expected_speedup

Progress = Callable[[int, int], None]
CONTEXT_TOKENS = 32  # generated behind each context


@dataclass(frozen=True)
class DrafterRow:
    """What one drafter of a peer's recipe did, over all runs. share: of the rounds of the decoder, those that it drafted.

    copied: accepted tokens that it copied from the prompt.
    """

    kind: str
    share: float
    rounds: int
    drafted: int
    accepted: int
    alpha: float | None
    copied: int


@dataclass(frozen=True)
class BenchRow:
    """One peer. Times in milliseconds; speedup over the first peer, paired by prompt, with its 95 % interval.

    beta, verify_ratio: a draft and a verify pass over a plain pass of the same engine, where that took part, each timed on its own;
    closed_form: the speedup over that engine's plain decoding that α, β, v and a fixed draft length predict. What only our engines know
    is None for others. peak_bytes: weights, and the most that a run took beside them. memory_normalised: the speedup over the first peer
    divided by the memory relative to it (S3D's M). bandwidth_share: bytes that a token of plain decoding has to read, over the bytes
    that this machine reads in the time it took; None where a token is not a pass. loop_overhead: of the decode time, the share outside
    model passes. by_drafter: in the order of the recipe.
    """

    peer: str
    engine: str
    ms_per_token: float
    ms_per_token_quartiles: tuple[float, float]
    first_token_ms: float
    tokens_per_second: float
    end_to_end_tokens_per_second: float
    speedup: Estimate
    identical: int
    prompts: int
    tau: float | None
    alpha: float | None
    accepted_fraction: float | None
    beta: float | None
    verify_ratio: float | None
    closed_form: float | None
    peak_bytes: int | None
    memory_normalised: float | None
    bandwidth_share: float | None
    loop_overhead: float | None
    by_drafter: list[DrafterRow]
    by_group: dict[str, Estimate]
    by_context: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench(peers: Sequence[Peer], requests: Sequence[Request], repeats: int = 3, contexts: Sequence[int] = (),
          progress: Progress = lambda done, total: None) -> list[BenchRow]:
    """Greedy decoding of each request by every peer, then of each context length."""
    for peer in peers:
        for _ in range(2):  # kernels are chosen, graphs recorded, pages touched
            peer.run(requests[0].prompt, min(requests[0].new_tokens, 24))
    runs: dict[str, list[list[Run]]] = {peer.name: [[] for _ in requests] for peer in peers}
    total, done = repeats * (len(requests) + len(contexts)), 0
    for repeat in range(repeats):
        for p, request in enumerate(requests):
            for peer in _turn(peers, p + repeat):
                runs[peer.name][p].append(peer.run(request.prompt, request.new_tokens))
            progress(done := done + 1, total)
    paces = _at_contexts(peers, requests, contexts, repeats, lambda: progress(done, total))
    longest = max(requests, key=lambda r: len(r.prompt) + r.new_tokens)
    peaks = {peer.name: peak_of(lambda peer=peer: peer.run(longest.prompt, longest.new_tokens),  # type: ignore[misc]
                                peer.model.spec.device) for peer in peers}
    bandwidth = read_bandwidth(peers[0].model.spec.device, peers[0].model.read_bytes)
    times = {peer.name: pass_times(peer, requests[:8]) for peer in peers if isinstance(peer, OurPeer)}
    return [_row(peer, peers, requests, runs, paces[peer.name], peaks, bandwidth, times) for peer in peers]


def _turn(peers: Sequence[Peer], turn: int) -> list[Peer]:
    shift = turn % len(peers)
    return [*peers[shift:], *peers[:shift]]


def _at_contexts(peers: Sequence[Peer], requests: Sequence[Request], contexts: Sequence[int], repeats: int,
                 step: Callable[[], None]) -> dict[str, dict[int, float]]:
    """Milliseconds a token behind so many tokens of the prompts' own text; contexts that the model was not made for are left out."""
    text = [t for request in requests for t in request.prompt]
    most = peers[0].model.spec.context
    paces: dict[str, dict[int, list[float]]] = {peer.name: {} for peer in peers}
    for repeat in range(repeats):
        for c in contexts:
            if most is not None and c + CONTEXT_TOKENS > most:
                continue
            prompt = (text * (c // len(text) + 1))[:c]
            for peer in _turn(peers, repeat):
                run = peer.run(prompt, CONTEXT_TOKENS)
                paces[peer.name].setdefault(c, []).append(1e3 * run.decode / (len(run.tokens) - 1))
            step()
    return {name: {c: median(values) for c, values in found.items()} for name, found in paces.items()}


def _row(peer: Peer, peers: Sequence[Peer], requests: Sequence[Request], all_runs: dict[str, list[list[Run]]], by_context: dict[int, float],
         peaks: dict[str, int | None], bandwidth: float, times: dict[str, PassTimes]) -> BenchRow:
    first, runs = all_runs[peers[0].name], all_runs[peer.name]
    pace = sorted(1e3 * r.decode / (len(r.tokens) - 1) for rs in runs for r in rs)
    stats = sum((r.stats for rs in runs for r in rs if r.stats), DecodeStats())
    seconds = sum(r.first_token + r.decode for rs in runs for r in rs)
    written = sum(len(r.tokens) for rs in runs for r in rs)
    speedup = _speedup(first, runs)
    mine, plain = times.get(peer.name), _plain_pass(peer, peers, times)
    beta = mine.a_draft / plain if mine and mine.a_draft and plain else None
    v = mine.a_full / plain if mine and stats.drafted and plain else None
    memory, reference = (None if peaks[p.name] is None else p.model.weight_bytes + (peaks[p.name] or 0) for p in (peer, peers[0]))
    context = sum((len(r.prompt) + r.new_tokens / 2) for r in requests) / len(requests)
    a_pass_a_token = stats.drafted == 0 if stats.rounds else peer.name in ("hf-generate", "hf-compile", "llama-cpp")
    typical = median(pace)
    return BenchRow(
        peer=peer.name, engine=peer.engine, ms_per_token=typical,
        ms_per_token_quartiles=(pace[len(pace) // 4], pace[3 * len(pace) // 4]),
        first_token_ms=1e3 * median(r.first_token for rs in runs for r in rs), tokens_per_second=1e3 / typical,
        end_to_end_tokens_per_second=written / seconds, speedup=speedup,
        identical=sum(a[0].tokens == b[0].tokens for a, b in zip(runs, first, strict=True)), prompts=len(runs),
        tau=stats.tau, alpha=stats.alpha, accepted_fraction=stats.accepted_fraction,
        beta=beta, verify_ratio=v, closed_form=_closed_form(peer, stats, beta, v),
        peak_bytes=memory, memory_normalised=speedup.mean * reference / memory if memory and reference else None,
        bandwidth_share=bytes_read(peer.model, context) / (typical / 1e3) / bandwidth if a_pass_a_token else None,
        loop_overhead=mine.loop_share if mine else None,
        by_drafter=_by_drafter(peer, stats),
        by_group={g: _speedup([rs for rs, q in zip(first, requests, strict=True) if q.group == g],
                              [rs for rs, q in zip(runs, requests, strict=True) if q.group == g])
                  for g in dict.fromkeys(q.group for q in requests) if g},
        by_context=by_context)


def _by_drafter(peer: Peer, stats: DecodeStats) -> list[DrafterRow]:
    drafters = peer.decoder.recipe.drafters if isinstance(peer, OurPeer) else ()
    return [DrafterRow(spec.kind, counts.rounds / stats.rounds, counts.rounds, counts.drafted, counts.accepted, counts.alpha, counts.copied)
            for spec, counts in zip(drafters, stats.by_drafter, strict=True)]


def _speedup(first: list[list[Run]], ours: list[list[Run]]) -> Estimate:
    theirs, mine = ([median(r.decode for r in rs) for rs in side] for side in (first, ours))
    return bootstrap_ratio(theirs, mine)


def _plain_pass(peer: Peer, peers: Sequence[Peer], times: dict[str, PassTimes]) -> float | None:
    """Seconds of a plain pass by the engine of this peer, if that took part."""
    plain = [other for other in peers if other.name.startswith("plain") and other.model is peer.model]
    return times[plain[0].name].a_full if plain and plain[0].name in times else None


def _closed_form(peer: Peer, stats: DecodeStats, beta: float | None, v: float | None) -> float | None:
    drafters = peer.decoder.recipe.drafters if isinstance(peer, OurPeer) else ()
    fixed = len(drafters) == 1 and isinstance(getattr(drafters[0], "exit", None), Fixed)
    if not fixed or beta is None or v is None or stats.alpha is None:
        return None
    return expected_speedup(stats.alpha, drafters[0].draft_length, beta, v)
