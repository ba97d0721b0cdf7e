"""Time real decoding on the wall clock, prompt by prompt, with several decoders in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from skipsearch.core.sequences import common_prefix_length
from skipsearch.core.stats import DecodeStats, Estimate, bootstrap_ratio
from skipsearch.decoding import Decoder, Generation
from skipsearch.engine import no_grad
from skipsearch.errors import SearchError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.workload import Workload

CHECK_EVERY = 8  # prompts between two tests whether the two fastest candidates differ significantly


NO_ROUNDS = (
    "the model ends every one of these prompts with its first token, or loops from there on, so "
    "there is no round to time: take another task, or --chat if these are requests to a chat model"
)


@dataclass(frozen=True)
class TimedGeneration:
    """The timed generation of one decoder on one prompt, in one repeat."""

    prompt_index: int
    seconds: float  # of the rounds, without the prefill
    n_tokens: int  # of the rounds, without the prefill's token
    stats: DecodeStats
    generation: Generation
    while_learning: bool = False  # whether a drafter still learned from request to request


@dataclass
class Timings:
    """The timed generations of one decoder."""

    samples: list[TimedGeneration] = field(default_factory=list)

    @property
    def stats(self) -> DecodeStats:
        return sum((s.stats for s in self.samples), DecodeStats())

    def totals_by_prompt(self, value_of: Callable[[TimedGeneration], float]) -> list[float]:
        """Return the sum of a value over the repeats of each prompt, in the order of prompts."""
        totals: dict[int, float] = {}
        for s in self.samples:
            totals[s.prompt_index] = totals.get(s.prompt_index, 0.0) + value_of(s)
        return [totals[p] for p in sorted(totals)]

    def subset(self, includes_prompt: Callable[[int], bool]) -> Timings:
        """Return the timings of some prompts."""
        return Timings([s for s in self.samples if includes_prompt(s.prompt_index)])

    @property
    def n_prompts(self) -> int:
        return len({s.prompt_index for s in self.samples})

    @property
    def seconds_per_token(self) -> float:
        return sum(s.seconds for s in self.samples) / max(1, sum(s.n_tokens for s in self.samples))

    def estimate(self) -> Estimate:
        """Return the estimated seconds per token, with a bootstrap interval over prompts."""
        return bootstrap_ratio(
            self.totals_by_prompt(lambda s: s.seconds), self.totals_by_prompt(lambda s: s.n_tokens)
        )

    def speedup_over(self, baseline: Timings) -> Estimate:
        """Return the baseline's time over ours, on the same prompts.

        The time of a prompt is its seconds per token times the baseline's number of tokens, because
        generations may differ in length.
        """
        weights = baseline.totals_by_prompt(lambda s: s.n_tokens)
        baseline_s, ours_s = (
            [s * w for s, w in zip(timings._seconds_per_token_by_prompt(), weights, strict=True)]
            for timings in (baseline, self)
        )
        return bootstrap_ratio(baseline_s, ours_s)

    def _seconds_per_token_by_prompt(self) -> list[float]:
        seconds = self.totals_by_prompt(lambda s: s.seconds)
        n_tokens = self.totals_by_prompt(lambda s: s.n_tokens)
        return [s / n for s, n in zip(seconds, n_tokens, strict=True)]


class PairedTimings(NamedTuple):
    """Timings of a recipe and of plain decoding on the same prompts, measured in turn."""

    plain: Timings
    drafted: Timings

    @property
    def speedup(self) -> Estimate:
        return self.drafted.speedup_over(self.plain)


def time_interleaved(
    decoders: Sequence[Decoder],
    workload: Workload,
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    prompt_indices: Sequence[int] | None = None,
    may_be_empty: bool = False,
) -> list[Timings]:
    """Time every decoder on every prompt, in an order that rotates from prompt to prompt.

    prompt_indices: the prompts to time; None: all prompts.
    progress(done, total) is called after each prompt.
    A generation that ends with the prefill's token has no round; its prompt is then left out for
    all decoders. Raises: SearchError if no prompt remains, unless the result `may_be_empty`.
    """
    timings = [Timings() for _ in decoders]
    prompts = range(len(workload.prompt_ids)) if prompt_indices is None else prompt_indices
    for decoder in decoders:  # warm-up
        workload.generate(decoder, prompts[0], seed, max_tokens=8)
    total = repeats * len(prompts)
    for repeat in range(repeats):
        for n, p in enumerate(prompts):
            shift = (p + repeat) % len(decoders)
            for d in [*range(shift, len(decoders)), *range(shift)]:
                generation = workload.generate(decoders[d], p, seed + p)
                stats = generation.stats
                if stats.round_tokens:
                    timings[d].samples.append(
                        TimedGeneration(
                            p,
                            stats.decode_seconds,
                            stats.round_tokens,
                            stats,
                            generation,
                            decoders[d].is_learning,
                        )
                    )
            progress(repeat * len(prompts) + n + 1, total)
    common = set.intersection(*({s.prompt_index for s in t.samples} for t in timings))
    if not common and not may_be_empty:
        raise SearchError(NO_ROUNDS)
    return [Timings([s for s in t.samples if s.prompt_index in common]) for t in timings]


def successive_halving(
    plain: Decoder,
    candidates: Sequence[Decoder],
    workload: Workload,
    rungs: Sequence[int],
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    corrections: Sequence[Callable[[Collection[int]], float]] = (),
    tie_break_prompts: int = 0,
) -> tuple[int, list[PairedTimings]]:
    """Find the fastest candidate by successive halving.

    All candidates decode the first rungs[0] prompts. The faster half of them decode the next
    rungs[1] prompts, and so on. Source: Jamieson & Talwalkar 2016.

    corrections: for each candidate, a function that takes prompt indices and returns a factor. The
    factor times the seconds per token on these prompts estimates the seconds per token on all
    prompts (a control variate). (): no corrections.
    tie_break_prompts: the most further prompts that the two fastest candidates decode, until their
    speeds differ significantly.

    Returns (index of the winner, timings of each candidate and of plain decoding on the prompts
    that the candidate decoded).
    """
    remaining = list(range(len(candidates)))
    seen = [PairedTimings(Timings(), Timings()) for _ in candidates]
    sizes = [*rungs, *[CHECK_EVERY] * (tie_break_prompts // CHECK_EVERY)]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = [
        range(begin, min(begin + size, len(workload.prompt_ids)))
        for begin, size in zip(begins, sizes, strict=True)
    ]
    total, done = sum(map(len, spans)), 0

    def factor(i: int) -> float:
        if not corrections:
            return 1.0
        return corrections[i]({sample.prompt_index for sample in seen[i].drafted.samples})

    def decided() -> bool:
        first, second = remaining
        ratio = seen[first].drafted.speedup_over(seen[second].drafted)
        return not ratio.low <= factor(first) / factor(second) <= ratio.high

    for rung, span in enumerate(spans):
        if not span or (len(remaining) == 1 and done) or (rung >= len(rungs) and decided()):
            break
        plain_timings, *drafted_timings = time_interleaved(
            [plain, *(candidates[i] for i in remaining)],
            workload,
            1,
            seed,
            lambda n, _, before=done: progress(before + n, total),  # type: ignore[misc]
            prompt_indices=span,
            may_be_empty=True,  # a span may have such prompts alone
        )
        for i, timings in zip(remaining, drafted_timings, strict=True):
            seen[i].plain.samples.extend(plain_timings.samples)
            seen[i].drafted.samples.extend(timings.samples)
        if not seen[remaining[0]].plain.samples:
            done += len(span)
            continue
        remaining.sort(key=lambda i: -seen[i].speedup.mean / factor(i))
        keep = (
            max(1, len(remaining) // 2) if rung + 1 < len(rungs) else 2 if tie_break_prompts else 1
        )
        remaining, done = remaining[:keep], done + len(span)
    if not seen[remaining[0]].plain.samples:
        raise SearchError(NO_ROUNDS)
    return remaining[0], seen


@dataclass(frozen=True)
class Divergence:
    """The first difference between two greedy generations."""

    index: int  # of the generated token
    gap: float  # between the full model's two largest logits at this token


@no_grad
def find_first_divergence(
    model: ModelAdapter, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Return the first difference of two generations of a prompt; None if they are identical."""
    from skipsearch.engine import forward
    from skipsearch.models.kv_cache import Planner

    if list(plain) == list(other):
        return None
    index = common_prefix_length(plain, other)
    text = [*prompt, *plain[:index]]
    device = model.spec.device
    logits = forward(
        model,
        torch.tensor([text], device=device),
        model.new_cache(1, len(text)),
        Planner(len(text), device).plan_chain(0, len(text)),
        last_only=True,
    )[0, -1].float()
    top = logits.topk(2).values
    return Divergence(index, float(top[0] - top[1]))
