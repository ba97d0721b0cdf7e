"""Wall clock: real draft-and-verify decoding, warmed up, synchronised, interleaved with plain decoding, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from skipsearch.decoding import Decoder, Generation
from skipsearch.engine import inference
from skipsearch.errors import SearchError
from skipsearch.evaluation.prompts import Workload
from skipsearch.models.spec import ModelAdapter
from skipsearch.stats import DecodeStats, Estimate, bootstrap_ratio

LOOK = 8   # prompts between two looks at whether the two fastest can be told apart


@dataclass(frozen=True)
class Sample:
    """One decoder on one prompt, in one repeat. learning: whether a drafter of it still learned from request to request."""

    prompt: int
    seconds: float
    tokens: int
    stats: DecodeStats
    generation: Generation
    learning: bool = False


@dataclass
class Timings:
    """Samples of one decoder."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def stats(self) -> DecodeStats:
        return sum((s.stats for s in self.samples), DecodeStats())

    def by_prompt(self, what: Callable[[Sample], float]) -> list[float]:
        """Totals over repeats, a prompt each."""
        totals: dict[int, float] = {}
        for s in self.samples:
            totals[s.prompt] = totals.get(s.prompt, 0.0) + what(s)
        return [totals[p] for p in sorted(totals)]

    def of(self, belongs: Callable[[int], bool]) -> Timings:
        """Of some prompts, by their numbers."""
        return Timings([s for s in self.samples if belongs(s.prompt)])

    @property
    def prompts(self) -> int:
        return len({s.prompt for s in self.samples})

    @property
    def seconds_per_token(self) -> float:
        return sum(s.seconds for s in self.samples) / max(1, sum(s.tokens for s in self.samples))

    def estimate(self) -> Estimate:
        """Seconds per verified token with a bootstrap interval over prompts."""
        return bootstrap_ratio(self.by_prompt(lambda s: s.seconds), self.by_prompt(lambda s: s.tokens))

    def speedup_over(self, baseline: Timings) -> Estimate:
        """Ratio of total times over the same prompts, paired by prompt; per token, should a repeat have ended elsewhere."""
        ours = [s / t for s, t in zip(self.by_prompt(lambda s: s.seconds), self.by_prompt(lambda s: s.tokens), strict=True)]
        theirs = [s / t for s, t in zip(baseline.by_prompt(lambda s: s.seconds), baseline.by_prompt(lambda s: s.tokens), strict=True)]
        weights = baseline.by_prompt(lambda s: s.tokens)
        return bootstrap_ratio([a * w for a, w in zip(theirs, weights, strict=True)],
                               [b * w for b, w in zip(ours, weights, strict=True)])


def race(decoders: Sequence[Decoder], workload: Workload, repeats: int = 1, seed: int = 0,
         progress: Callable[[int, int], None] = lambda done, total: None, only: Sequence[int] | None = None) -> list[Timings]:
    """Every decoder on every prompt (or on those of `only`), taking turns within a prompt, the order rotating from prompt to prompt.

    Prompts whose generation ends with the prefill's own token are left out by all: no round was run. progress(done, total).
    Raises: SearchError if that leaves none.
    """
    timings = [Timings() for _ in decoders]
    prompts = range(len(workload.prompts)) if only is None else only
    for decoder in decoders:  # warm-up
        workload.generate(decoder, prompts[0], seed, limit=8)
    total = repeats * len(prompts)
    for repeat in range(repeats):
        for n, p in enumerate(prompts):
            shift = (p + repeat) % len(decoders)
            for d in [*range(shift, len(decoders)), *range(shift)]:
                generation = workload.generate(decoders[d], p, seed + p)
                stats = generation.stats
                if stats.round_tokens:
                    timings[d].samples.append(Sample(p, stats.decode_seconds, stats.round_tokens, stats, generation,
                                                     decoders[d].learning))
            progress(repeat * len(prompts) + n + 1, total)
    return _common_prompts(timings)


def knock_out(plain: Decoder, contenders: Sequence[Decoder], workload: Workload, rungs: Sequence[int], seed: int = 0,
              progress: Callable[[int, int], None] = lambda done, total: None,
              corrections: Sequence[Callable[[Collection[int]], float]] = (),
              further: int = 0) -> tuple[int, list[tuple[Timings, Timings]]]:
    """Successive halving: all contenders on the first rungs[0] prompts, the faster half of them on the next rungs[1], and so on.

    corrections: one a contender: what its seconds per token on some prompts are multiplied by to be those of all, for the chance in which
    prompts come first (a control variate). None at all: seconds as measured.
    further: prompts that the two fastest go on to, at most, for as long as the interval of one over the other holds 1.

    Returns the winner, and for each contender (plain decoding's timings, its own) over the prompts that it got to see.
    Source: Jamieson & Talwalkar 2016.
    """
    left = list(range(len(contenders)))
    seen: list[tuple[Timings, Timings]] = [(Timings(), Timings()) for _ in contenders]
    sizes = [*rungs, *[LOOK] * (further // LOOK)]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = [range(begin, min(begin + size, len(workload.prompts))) for begin, size in zip(begins, sizes, strict=True)]
    total, done = sum(map(len, spans)), 0

    def factor(i: int) -> float:
        return corrections[i]({sample.prompt for sample in seen[i][1].samples}) if corrections else 1.0

    def decided() -> bool:
        one, other = (seen[i][1] for i in left)
        ratio = one.speedup_over(other)
        return not ratio.low <= factor(left[0]) / factor(left[1]) <= ratio.high

    for rung, span in enumerate(spans):
        if not span or (len(left) == 1 and done) or (rung >= len(rungs) and decided()):
            break
        beside, *ours = race([plain, *(contenders[i] for i in left)], workload, 1, seed,
                             lambda n, _, before=done: progress(before + n, total), only=span)  # type: ignore[misc]
        for i, timings in zip(left, ours, strict=True):
            seen[i][0].samples.extend(beside.samples)
            seen[i][1].samples.extend(timings.samples)
        left.sort(key=lambda i: -seen[i][1].speedup_over(seen[i][0]).mean / factor(i))
        keep = max(1, len(left) // 2) if rung + 1 < len(rungs) else 2 if further else 1
        left, done = left[:keep], done + len(span)
    return left[0], seen


def _common_prompts(timings: list[Timings]) -> list[Timings]:
    common = set.intersection(*({s.prompt for s in t.samples} for t in timings))
    if not common:
        raise SearchError("the model ends every one of these prompts with its first token, so there is no round to time: take another task")
    return [Timings([s for s in t.samples if s.prompt in common]) for t in timings]


@dataclass(frozen=True)
class Divergence:
    """Where two greedy generations part: token index, and the gap of the full model's two top logits there."""

    index: int
    gap: float


@inference
def first_divergence(model: ModelAdapter, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """None if the two are identical."""
    from skipsearch.cache import Planner
    from skipsearch.engine import forward

    if list(plain) == list(other):
        return None
    index = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    text = [*prompt, *plain[:index]]
    device = model.spec.device
    logits = forward(model, torch.tensor([text], device=device), model.new_cache(1, len(text)),
                     Planner(len(text), device).chain(0, len(text)), last_only=True)[0, -1].float()
    top = logits.topk(2).values
    return Divergence(index, float(top[0] - top[1]))
