"""A race of decoders: all decode the same prompts, and those that cannot win drop out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import numpy as np

from skipsearch.core.stats import jackknife_stderr, student_quantile
from skipsearch.decoding import Decoder
from skipsearch.decoding.prefix_cache import PrefixCache
from skipsearch.errors import SearchError
from skipsearch.replay.workload import Workload
from skipsearch.timing.interleaved import (
    NO_ROUNDS,
    PairedTimings,
    Timings,
    add_samples,
    time_prompt,
    warm_up,
)

# A candidate drops out once it is certain that it is not WORTHWHILE_GAIN faster than the fastest.
# So a race between equals takes no longer than that gain is worth, and what is 5 % faster than the
# winner drops out in fewer than 5 of 100 races: tests/benchmarks/sequential_rules.py.
WORTHWHILE_GAIN = 1.03
CERTAINTY = 0.99  # of one comparison; a race has many
MIN_COMPARED_PROMPTS = 5  # before anything is certain; intervals of fewer say nothing
ROUNDING = 1e-9  # of a difference of logarithms
# Prompts that plain decoding and the winner decode at least, for the winner's speedup. The
# comparison does not need them: if time is short, plain decoding has MIN_PLAIN_PROMPTS.
PLAIN_PROMPTS, MIN_PLAIN_PROMPTS = 8, 3


class RaceResult(NamedTuple):
    """The outcome of a race: indices of candidates, and the timings of each.

    The winner is the simplest candidate that the race does not tell apart from the fastest. The
    timings are of the prompts that both the candidate and plain decoding decoded.
    """

    winner: int
    fastest: int
    timings: list[PairedTimings]


def race_decoders(
    plain: Decoder,
    candidates: Sequence[Decoder],
    workload: Workload,
    rungs: Sequence[int],
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    corrections: Sequence[Callable[[Collection[int]], float]] = (),
    limit_s: float | None = None,
    shares_prompts: bool = False,
    complexities: Sequence[int] = (),
    n_plain: int = PLAIN_PROMPTS,
) -> RaceResult:
    """Find the fastest candidate.

    All candidates decode one prompt after the other, and `list_remaining` says after each who
    decodes the next. Plain decoding takes part in the first `n_plain` of them.
    rungs: numbers of prompts. After rungs[0] prompts the faster half of the candidates stays,
    rungs[1] prompts later the faster half of these, and so on, but never fewer than two; the last
    rung ends the race. This bounds the time of a race in which nothing becomes certain.
    Source: Jamieson & Talwalkar 2016.
    corrections: for each candidate, a function that takes prompt indices and returns a factor. The
    factor times the seconds per token on these prompts estimates the seconds per token on all
    prompts (a control variate). (): no corrections.
    limit_s: after this many seconds no prompt begins; None: no limit. At least one is decoded.
    shares_prompts: whether one decoder alone reads a prompt, and the others begin with its K/V.
    Drafters that read the prompt's hidden states need the prompt themselves.
    complexities: of each candidate, for `choose_simplest`. (): all are alike.

    Raises: SearchError if no prompt has a round.
    """
    standings = list(range(len(candidates)))  # fastest first
    baseline, timings = Timings(), [Timings() for _ in candidates]
    halvings, total = set(accumulate(rungs[:-1])), min(sum(rungs), len(workload.prompt_ids))
    started = perf_counter()
    warm_up([plain, *candidates], workload, seed)
    for prompt in range(total):
        is_over_time = limit_s is not None and perf_counter() - started > limit_s
        if is_over_time and baseline.samples:
            break
        remaining = sorted(standings)
        n = len(timings[remaining[0]].samples)
        if len(remaining) == 1 and n >= n_plain:
            break
        with_plain = len(baseline.samples) < n_plain
        racing = [candidates[i] for i in remaining]
        samples = time_prompt(
            [*racing, plain] if with_plain else racing,
            workload,
            prompt,
            seed,
            prompt,
            PrefixCache() if shares_prompts else None,
        )
        add_samples([*(timings[i] for i in remaining), baseline], samples)
        progress(prompt + 1, total)
        if samples:
            chosen = [corrections[i] for i in remaining] if corrections else ()
            places = list_remaining(
                *compare_times([timings[i] for i in remaining], chosen), n + 1 in halvings
            )
            standings = [remaining[place] for place in places]
    if not baseline.samples:
        raise SearchError(NO_ROUNDS)
    fastest = standings[0]
    winner = choose_simplest(fastest, timings, corrections, complexities or [0] * len(timings))
    return RaceResult(winner, fastest, [_pair(baseline, drafted) for drafted in timings])


def choose_simplest(
    fastest: int,
    timings: Sequence[Timings],
    corrections: Sequence[Callable[[Collection[int]], float]],
    complexities: Sequence[int],
) -> int:
    """Return the simplest candidate that is within one standard error of the fastest.

    Each is compared with the fastest on the prompts that it decoded, at least MIN_COMPARED_PROMPTS.
    Source: the one-standard-error rule of Breiman et al. 1984, section 3.4.3.
    """
    simpler = [i for i, n in enumerate(complexities) if n < complexities[fastest]]
    for i in sorted(simpler, key=complexities.__getitem__):
        prompts = {sample.prompt_index for sample in timings[i].samples}
        log_times, without_one, shares = compare_times(
            [timings[fastest].subset(prompts.__contains__), timings[i]],
            [corrections[fastest], corrections[i]] if corrections else (),
        )
        if len(shares) < MIN_COMPARED_PROMPTS:
            continue
        error = jackknife_stderr(without_one - without_one[0])
        if log_times[1] - log_times[0] <= error[1]:
            return i
    return fastest


def compare_times(
    timings: Sequence[Timings], corrections: Sequence[Callable[[Collection[int]], float]] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `list_remaining` needs to know of candidates that decoded the same prompts.

    corrections: as in `race_decoders`. They are left out if the times differ less without them: a
    prediction from parts of the answers may vary more than the answers do.
    Returns (log_times [candidates], without_one [candidates, prompts], shares [prompts]): the
    logarithms of the corrected times, the same without each one of the prompts, and the share of
    each prompt in the time. A prompt counts as often as it has tokens; texts may differ if they are
    sampled, so this is the mean over candidates.
    """
    prompts = sorted({sample.prompt_index for sample in timings[0].samples})
    n_tokens = np.array([timing.totals_by_prompt(lambda s: s.n_tokens) for timing in timings])
    seconds = np.array([timing.totals_by_prompt(lambda s: s.seconds) for timing in timings])
    seconds = seconds / n_tokens * n_tokens.mean(axis=0)
    totals = seconds.sum(axis=1, keepdims=True)
    log_times = np.log(totals[:, 0])
    with np.errstate(divide="ignore"):  # one prompt alone leaves no time
        without_one = np.log(totals - seconds)
    shares = (seconds / totals).mean(axis=0)
    if not corrections or len(prompts) < MIN_COMPARED_PROMPTS:
        return log_times, without_one, shares
    factors = np.log([factor(prompts) for factor in corrections])
    others = [[q for q in prompts if q != p] for p in prompts]
    corrected = without_one + np.log([[factor(rest) for rest in others] for factor in corrections])
    if _measure_spread(corrected) > _measure_spread(without_one) + ROUNDING:
        return log_times, without_one, shares
    return log_times + factors, corrected, shares


def _measure_spread(without_one: np.ndarray) -> float:
    """Return the mean standard error of the differences between candidates."""
    return float(jackknife_stderr(without_one - without_one.mean(axis=0)).mean())


def list_remaining(
    log_times: np.ndarray, without_one: np.ndarray, shares: np.ndarray, halves: bool
) -> list[int]:
    """Return the candidates that stay in a race, fastest first.

    Arguments as `compare_times` returns them. halves: the faster half stays at most, but no fewer
    than two.
    """
    order = np.argsort(log_times, kind="stable").tolist()
    leader = order[0]
    if len(shares) >= MIN_COMPARED_PROMPTS:
        error = jackknife_stderr(without_one - without_one[leader])
        least = log_times - log_times[leader] - student_quantile(CERTAINTY, shares) * error
        order = [i for i in order if i == leader or least[i] <= -np.log(WORTHWHILE_GAIN)]
    return order[: max(2, len(log_times) // 2)] if halves else order


def _pair(plain: Timings, drafted: Timings) -> PairedTimings:
    """Return the timings of the prompts that both decoded."""
    common = {s.prompt_index for s in plain.samples} & {s.prompt_index for s in drafted.samples}
    return PairedTimings(plain.subset(common.__contains__), drafted.subset(common.__contains__))
