"""Time real decoding on the wall clock, prompt by prompt, with several decoders in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple

import torch

from skipsearch.core.sequences import common_prefix_length
from skipsearch.core.stats import DecodeStats, Estimate, estimate_ratio
from skipsearch.decoding import Decoder, Generation
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.engine import no_grad
from skipsearch.errors import SearchError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.workload import Workload

# A measurement ends once its interval reaches no further from its centre than this ratio. It is
# looked at after FIRST_CHECK prompts and every CHECK_EVERY further ones.
NARROW_RATIO = 1.05
FIRST_CHECK = 12  # fewer tell too little of how much prompts differ
CHECK_EVERY = 4
FEWEST_PROMPTS = 4  # are measured even if the time is over; fewer have no interval worth the name

# Why a measurement ended: the interval was narrow, the time was over, or no prompt was left.
Stop = Literal["narrow", "time_over", "prompts_ended"]

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

    def estimate(self, stopped_early: bool = False) -> Estimate:
        """Return the estimated seconds per token, with its interval over prompts.

        stopped_early: as in `estimate_ratio`.
        """
        return estimate_ratio(
            self.totals_by_prompt(lambda s: s.seconds),
            self.totals_by_prompt(lambda s: s.n_tokens),
            stopped_early,
        )

    def speedup_over(
        self, baseline: Timings, stopped_early: bool = False, with_prefill: bool = False
    ) -> Estimate:
        """Return the baseline's time over ours, on the same prompts.

        The time of a prompt is its seconds per token times the baseline's number of tokens, because
        generations may differ in length.
        stopped_early: as in `estimate_ratio`. with_prefill: add the seconds of the prefill.
        """
        weights = baseline.totals_by_prompt(lambda s: s.n_tokens)
        baseline_s, ours_s = (
            [
                s * w + (prefill_s if with_prefill else 0.0)
                for s, w, prefill_s in zip(
                    timings._seconds_per_token_by_prompt(),
                    weights,
                    timings.totals_by_prompt(lambda s: s.stats.prefill_seconds),
                    strict=True,
                )
            ]
            for timings in (baseline, self)
        )
        return estimate_ratio(baseline_s, ours_s, stopped_early)

    def _seconds_per_token_by_prompt(self) -> list[float]:
        seconds = self.totals_by_prompt(lambda s: s.seconds)
        n_tokens = self.totals_by_prompt(lambda s: s.n_tokens)
        return [s / n for s, n in zip(seconds, n_tokens, strict=True)]


class PairedTimings(NamedTuple):
    """Timings of a recipe and of plain decoding on the same prompts, measured in turn."""

    plain: Timings
    drafted: Timings
    stopped: Stop = "prompts_ended"

    @property
    def stopped_early(self) -> bool:
        """As in `estimate_ratio`."""
        return self.stopped == "narrow"

    @property
    def speedup(self) -> Estimate:
        return self.drafted.speedup_over(self.plain, self.stopped_early)

    @property
    def is_narrow(self) -> bool:
        """Whether the interval is narrow enough to stop here."""
        speedup = self.drafted.speedup_over(self.plain, stopped_early=True)
        return speedup.high <= NARROW_RATIO * speedup.mean


def time_interleaved(
    decoders: Sequence[Decoder],
    workload: Workload,
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Timings]:
    """Time every decoder on every prompt, in an order that rotates from prompt to prompt.

    progress(done, total) is called after each prompt.
    A generation that ends with the prefill's token has no round; its prompt is then left out for
    all decoders. Raises: SearchError if no prompt remains.
    """
    timings = [Timings() for _ in decoders]
    warm_up(decoders, workload, seed)
    n_prompts = len(workload.prompt_ids)
    for n in range(repeats * n_prompts):
        repeat, prompt = divmod(n, n_prompts)
        add_samples(timings, time_prompt(decoders, workload, prompt, seed, prompt + repeat))
        progress(n + 1, repeats * n_prompts)
    if not timings[0].samples:
        raise SearchError(NO_ROUNDS)
    return timings


def measure_speedup(
    plain: Decoder,
    drafting: Decoder,
    workload: Workload,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    limit_s: float | None = None,
) -> PairedTimings:
    """Time a decoder and plain decoding in turn until the interval of the speedup is narrow.

    limit_s: after this many seconds no prompt begins, except for the first FEWEST_PROMPTS.

    Each prompt is decoded once: prompts differ by more than the repeats of one (with the embedded
    model on pycode, on a busy machine, the standard deviation of speedups was 0.30 over prompts and
    0.09 over repeats), so a second decoding of all prompts would hardly narrow the interval.
    Prompts are decoded in their order, so that which of them are measured depends on how many are
    needed alone. A drafter that learns from request to request decodes all of them, because its
    speedup is that of the whole stream.
    Raises: SearchError if no prompt has a round. progress(done, total) is called after each prompt.
    """
    decoders, timings = (plain, drafting), (Timings(), Timings())
    may_stop, started = not drafting.is_learning, perf_counter()
    warm_up(decoders, workload, seed)
    total = len(workload.prompt_ids)
    for prompt in range(total):
        is_over_time = limit_s is not None and perf_counter() - started > limit_s
        if may_stop and is_over_time and len(timings[0].samples) >= FEWEST_PROMPTS:
            return PairedTimings(*timings, stopped="time_over")
        add_samples(timings, time_prompt(decoders, workload, prompt, seed, prompt))
        progress(prompt + 1, total)
        n = len(timings[0].samples)
        is_look = prompt + 1 < total and n >= FIRST_CHECK and n % CHECK_EVERY == 0
        if may_stop and is_look and PairedTimings(*timings).is_narrow:
            return PairedTimings(*timings, stopped="narrow")
    if not timings[0].samples:
        raise SearchError(NO_ROUNDS)
    return PairedTimings(*timings)


def warm_up(decoders: Sequence[Decoder], workload: Workload, seed: int) -> None:
    """Decode a few tokens with every decoder."""
    for decoder in decoders:
        workload.generate(decoder, 0, seed, max_tokens=8)


def time_prompt(
    decoders: Sequence[Decoder],
    workload: Workload,
    prompt_index: int,
    seed: int,
    first: int,
    prefix_cache: PrefixCache | None = None,
) -> list[TimedGeneration]:
    """Time every decoder on one prompt, the `first` one first.

    first: modulo the number of decoders. prefix_cache: shared by the decoders, so that one of them
    alone reads the prompt. Returns [] if one of them ended with the prefill's token.
    """
    samples: dict[int, TimedGeneration] = {}
    for turn in range(len(decoders)):
        d = (first + turn) % len(decoders)
        generation = workload.generate(
            decoders[d], prompt_index, seed + prompt_index, prefix_cache=prefix_cache
        )
        stats = generation.stats
        samples[d] = TimedGeneration(
            prompt_index,
            stats.decode_seconds,
            stats.round_tokens,
            stats,
            generation,
            decoders[d].is_learning,
        )
    if not all(sample.n_tokens for sample in samples.values()):
        return []
    return [samples[d] for d in range(len(decoders))]


def add_samples(timings: Sequence[Timings], samples: Sequence[TimedGeneration]) -> None:
    """Add the samples of one prompt to the timings of each decoder; [] adds nothing."""
    for timing, sample in zip(timings, samples, strict=False):
        timing.samples.append(sample)


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
