"""Run a benchmark: every system decodes every prompt, in an order that rotates, after a warm-up.

Times and speedups are totals over prompts, of the median run of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from skipsearch.bench.bench_prompts import BenchRequest
from skipsearch.bench.peak_memory import measure_peak_memory
from skipsearch.bench.systems import SkipsearchSystem, System, SystemRun
from skipsearch.core.stats import DecodeStats, Estimate, estimate_ratio

BenchProgress = Callable[[int, int], None]
CONTEXT_TOKENS = 32  # generated after each context


@dataclass(frozen=True)
class DrafterRow:
    """The counts of one drafter of a recipe, over all runs of a system.

    share: fraction of the rounds in which this drafter drafted.
    copied: accepted tokens that it copied from the prompt.
    acceptance_by_position: acceptance rate at each position of its drafts.
    """

    kind: str
    share: float
    rounds: int
    drafted: int
    accepted: int
    alpha: float | None
    copied: int
    acceptance_by_position: list[float]


@dataclass(frozen=True)
class BenchRow:
    """The result of one system. A field that only our engines know is None for other programs.

    ms_per_token: the time of all answers, without their first tokens, over their tokens.
    ms_per_token_quartiles: over the runs of all prompts.
    speedup: ms_per_token of the first system over that of this one, with its 95 % interval.
    identical: number of prompts whose tokens equal those of the first system.
    beta, verify_ratio: time of a drafted token and of a verify pass over that of a plain pass on
    the same engine. None if nothing was drafted, or if no system decodes plainly on that engine.
    peak_bytes: bytes of the weights plus the most bytes that a run allocates besides them.
    memory_normalised: the speedup divided by peak_bytes relative to the first system (S3D's M).
    by_drafter: one row for each drafter, in the order of the recipe.
    by_group: speedup by category of prompts.
    by_context: milliseconds per token by number of context tokens.
    """

    system: str
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
    peak_bytes: int | None
    memory_normalised: float | None
    by_drafter: list[DrafterRow]
    by_group: dict[str, Estimate]
    by_context: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_benchmark(
    systems: Sequence[System],
    requests: Sequence[BenchRequest],
    repeats: int = 3,
    contexts: Sequence[int] = (),
    progress: BenchProgress = lambda done, total: None,
) -> list[BenchRow]:
    """Decode each request greedily with every system, then measure each context length."""
    for system in systems:
        for _ in range(2):  # warm-up: kernels are chosen, CUDA graphs recorded
            system.run(requests[0].prompt_ids, min(requests[0].new_tokens, 24))
    runs: dict[str, list[list[SystemRun]]] = {
        system.name: [[] for _ in requests] for system in systems
    }
    total, done = repeats * (len(requests) + len(contexts)), 0
    for repeat in range(repeats):
        for p, request in enumerate(requests):
            for system in _rotate(systems, p + repeat):
                runs[system.name][p].append(system.run(request.prompt_ids, request.new_tokens))
            progress(done := done + 1, total)
    paces = _time_contexts(systems, requests, contexts, repeats, lambda: progress(done, total))
    longest = max(requests, key=lambda r: len(r.prompt_ids) + r.new_tokens)
    peaks = {
        system.name: measure_peak_memory(
            lambda system=system: system.run(longest.prompt_ids, longest.new_tokens),  # type: ignore[misc]
            system.model.spec.device,
        )
        for system in systems
    }
    return [
        _make_bench_row(system, systems, requests, runs, paces[system.name], peaks)
        for system in systems
    ]


def _rotate(systems: Sequence[System], turn: int) -> list[System]:
    """Return the systems in order, beginning with number `turn`."""
    shift = turn % len(systems)
    return [*systems[shift:], *systems[:shift]]


def _time_contexts(
    systems: Sequence[System],
    requests: Sequence[BenchRequest],
    contexts: Sequence[int],
    repeats: int,
    step: Callable[[], None],
) -> dict[str, dict[int, float]]:
    """Return the median milliseconds per token of each system after contexts of these lengths.

    A context is made of the prompts' own text. A context that is too long for the model is left
    out. step: called after each context of each repeat.
    """
    text = [t for request in requests for t in request.prompt_ids]
    most = systems[0].model.spec.context_length
    paces: dict[str, dict[int, list[float]]] = {system.name: {} for system in systems}
    for repeat in range(repeats):
        for c in contexts:
            if most is not None and c + CONTEXT_TOKENS > most:
                continue
            prompt = (text * (c // len(text) + 1))[:c]
            for system in _rotate(systems, repeat):
                run = system.run(prompt, CONTEXT_TOKENS)
                paces[system.name].setdefault(c, []).append(
                    1e3 * run.decode_s / (len(run.tokens) - 1)
                )
            step()
    return {
        name: {c: median(values) for c, values in by_context.items()}
        for name, by_context in paces.items()
    }


def _make_bench_row(
    system: System,
    systems: Sequence[System],
    requests: Sequence[BenchRequest],
    all_runs: dict[str, list[list[SystemRun]]],
    by_context: dict[int, float],
    peaks: dict[str, int | None],
) -> BenchRow:
    """Return the result of one system, from the runs and measurements of all systems."""
    first, runs = all_runs[systems[0].name], all_runs[system.name]
    pace = sorted(1e3 * r.decode_s / (len(r.tokens) - 1) for rs in runs for r in rs)
    stats = _sum_stats(runs)
    seconds = sum(r.first_token_s + r.decode_s for rs in runs for r in rs)
    written = sum(len(r.tokens) for rs in runs for r in rs)
    speedup = _paired_speedup(first, runs)
    plain_pass_s = _plain_pass_s(system, systems, all_runs)
    beta, v = stats.cost_ratios(plain_pass_s) if plain_pass_s else (None, None)
    memory, reference = (
        None if peaks[p.name] is None else p.model.weight_bytes + (peaks[p.name] or 0)
        for p in (system, systems[0])
    )
    ms_per_token = 1e3 * sum(_median_seconds(runs)) / sum(len(rs[0].tokens) - 1 for rs in runs)
    return BenchRow(
        system=system.name,
        engine=system.engine,
        ms_per_token=ms_per_token,
        ms_per_token_quartiles=(pace[len(pace) // 4], pace[3 * len(pace) // 4]),
        first_token_ms=1e3 * median(r.first_token_s for rs in runs for r in rs),
        tokens_per_second=1e3 / ms_per_token,
        end_to_end_tokens_per_second=written / seconds,
        speedup=speedup,
        identical=sum(a[0].tokens == b[0].tokens for a, b in zip(runs, first, strict=True)),
        prompts=len(runs),
        tau=stats.tau,
        alpha=stats.alpha,
        accepted_fraction=stats.accepted_fraction,
        beta=beta,
        verify_ratio=v,
        peak_bytes=memory,
        memory_normalised=speedup.mean * reference / memory if memory and reference else None,
        by_drafter=_drafter_rows(system, stats),
        by_group={
            g: _paired_speedup(
                [rs for rs, q in zip(first, requests, strict=True) if q.category == g],
                [rs for rs, q in zip(runs, requests, strict=True) if q.category == g],
            )
            for g in dict.fromkeys(q.category for q in requests)
            if g
        },
        by_context=by_context,
    )


def _drafter_rows(system: System, stats: DecodeStats) -> list[DrafterRow]:
    """Return a row for each drafter of a system's recipe; [] for an `ExternalSystem`."""
    drafters = system.decoder.recipe.drafters if isinstance(system, SkipsearchSystem) else ()
    return [
        DrafterRow(
            spec.kind,
            counts.rounds / stats.rounds,
            counts.rounds,
            counts.drafted,
            counts.accepted,
            counts.alpha,
            counts.copied,
            counts.acceptance_by_position,
        )
        for spec, counts in zip(drafters, stats.by_drafter, strict=True)
    ]


def _paired_speedup(baseline: list[list[SystemRun]], ours: list[list[SystemRun]]) -> Estimate:
    """Return the speedup of `ours` over `baseline`, paired by prompt, with its interval."""
    return estimate_ratio(_median_seconds(baseline), _median_seconds(ours))


def _median_seconds(runs: list[list[SystemRun]]) -> list[float]:
    """Return the decode time of each prompt's median run."""
    return [median(run.decode_s for run in of_prompt) for of_prompt in runs]


def _sum_stats(runs: list[list[SystemRun]]) -> DecodeStats:
    return sum((r.stats for rs in runs for r in rs if r.stats), DecodeStats())


def _plain_pass_s(
    system: System, systems: Sequence[System], all_runs: dict[str, list[list[SystemRun]]]
) -> float | None:
    """Return the seconds of a plain pass on the system's engine.

    None if no system decodes plainly on this engine.
    """
    for other in systems:
        if other.name.startswith("plain") and other.model is system.model:
            stats = _sum_stats(all_runs[other.name])
            return stats.decode_seconds / stats.rounds
    return None
