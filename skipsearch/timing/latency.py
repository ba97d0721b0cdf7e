"""Measure the costs of passes and of their parts at one context length.

Times are medians of interleaved, synchronised measurements. Passes are timed in rounds as in
decoding: draft steps after a verify pass, with the scores of their tokens, and verify passes after
drafts. If a pass follows a pass of the same kind, its weights may be in the CPU's caches; after a
pass of another kind they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from skipsearch.core.cost_model import Costs
from skipsearch.core.machine import synchronize
from skipsearch.core.mask import SkipMask
from skipsearch.decoding.acceptor import accept_chain
from skipsearch.engine import draft_chain, draft_step, forward, no_grad
from skipsearch.engine.sampler import GREEDY, SamplingParams, TokenSampler, make_sampler
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner

WARM_UP_SWEEPS = 1  # uncounted sweeps through all masks, in which memory and clocks settle
CONSECUTIVE_STEPS = 2  # draft steps after the first of a round, and plain passes in a row
EXTRA_STEPS_IN_CALL = 4  # further draft steps, if an engine drafts in one call
ROUNDS_PER_MASK = 2  # rounds in a row with the same mask
PLAIN_RUNS = 3  # runs of plain passes before and after a sweep: the unit of all times
# The median of 2 sweeps is exact enough for passes that take longer than this; others take 6.
LONG_PASS_S, LONG_PASS_REPEATS, SHORT_PASS_REPEATS = 0.015, 1, 3
MAX_EXPONENT = 2.0  # of `Costs.curve`; caches do not explain more
MAX_COLD_PENALTY = 1.0  # caches do not explain more


@dataclass(frozen=True)
class LatencyEntry:
    """The costs at one context length, with the errors of their measurement."""

    context: int  # tokens of text
    costs: Costs
    spread: float  # quartile range of a one-token pass over its median
    # |predicted − measured| / measured of a draft step, for each checked mask
    errors: tuple[float, ...] = ()


def measure_costs(
    model: ModelAdapter,
    max_draft: int,
    context: int,
    repeats: int = 3,
    sampling: SamplingParams = GREEDY,
) -> Costs:
    """Measure the costs of drafts of 1 … max_draft tokens after `context` tokens of text."""
    return measure_latency(model, max_draft, context, repeats, sampling=sampling).costs


def time_plain_pass(
    model: ModelAdapter, context: int, repeats: int = 9, sampling: SamplingParams = GREEDY
) -> float:
    """Return the seconds of a pass over one token, the median of `repeats`."""
    rounds = RoundTimer(model, 0, context, sampling)
    rounds.time_plain()  # warm-up
    return median([rounds.time_plain() for _ in range(repeats)])


def measure_latency(
    model: ModelAdapter,
    max_draft: int,
    context: int,
    repeats: int | None = None,
    masks: Sequence[SkipMask] = (),
    sampling: SamplingParams = GREEDY,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatencyEntry:
    """Measure costs, and the errors of their predictions for a draft step with each of `masks`.

    repeats: pairs of sweeps; None: fewer if passes are long. progress(sweeps done, total).
    sampling: the parameters with which draft steps and verify passes choose tokens. Sampling takes
    longer: an engine that runs all steps of a greedy draft in one call runs sampled steps one by
    one.

    The cost of all attention blocks together is the time that skipping all of them saves, and
    likewise for MLPs. Both are scaled so that a mask that skips nothing costs a pass over one
    token. (The times of separate layers would lack the cost of the loop around them.) If both
    savings add up to more than 100 %, an exponent explains the excess: the remaining sub-layers run
    from a faster cache (`Costs.curve`). Within a kind, a layer gets a different share only if its
    time differs by more than the noise.

    A repeat sweeps from masks that skip little to masks that skip much, and back. Neighbouring
    masks are similar, so the caches are in a state as with a constant mask. Every time is in units
    of the plain passes before and after its sweep, because the speed of a shared machine changes
    within seconds.
    """
    n, rounds = model.spec.n_layers, RoundTimer(model, max_draft, context, sampling)
    everything = tuple(range(n))
    masks_run = [
        SkipMask(n, attn=everything),
        SkipMask(n, mlp=everything),
        SkipMask(n, everything, everything),
        *([SkipMask(n)] if rounds.drafts_in_one_call else []),
        *masks,
    ]
    sweeps = _mask_schedules([m.n_skipped for m in masks_run], max_draft)
    for sweep in islice(sweeps, WARM_UP_SWEEPS):
        for i, drafted in sweep:
            rounds.time_round(masks_run[i], drafted)
    plain = [[rounds.time_plain() for _ in range(PLAIN_RUNS)]]
    if repeats is None:
        is_long = median(plain[0]) > LONG_PASS_S
        repeats = LONG_PASS_REPEATS if is_long else SHORT_PASS_REPEATS
    layer_times: list[np.ndarray] = []  # [2L] by repeat
    # (first step, call, later step) of each round, by mask
    drafts: list[list[tuple[float, float, float]]] = [[] for _ in masks_run]
    # (mask, drafted tokens, time)
    verified: list[tuple[SkipMask, int, float]] = []
    for done, sweep in enumerate(islice(sweeps, 2 * repeats)):
        progress(done, 2 * repeats)
        runs = [(i, drafted, rounds.time_round(masks_run[i], drafted)) for i, drafted in sweep]
        sublayer_s = rounds.time_sublayers()
        plain.append([rounds.time_plain() for _ in range(PLAIN_RUNS)])
        pace = median(plain[-2] + plain[-1])
        layer_times.append(np.array(sublayer_s) / pace)
        for i, drafted, (*draft, verify) in runs:
            drafts[i].append(tuple(part / pace for part in draft))  # type: ignore[arg-type]
            verified.append((masks_run[i], drafted, verify / pace))
    # [masks] each
    firsts, calls, steps = np.array([np.median(times, axis=0) for times in drafts]).T
    call = float(np.median(calls))
    no_attn, no_mlp, no_sublayers, *checked = steps.tolist()
    full_step = max(checked.pop(0), no_sublayers) if rounds.drafts_in_one_call else 1.0
    overhead = min(no_sublayers, full_step)  # at most a full step, or noise could make a draft free
    all_sublayers = full_step - overhead
    curve, shares = _attn_mlp_shares(
        [(max(step, overhead) - overhead) / all_sublayers for step in (no_attn, no_mlp)]
        if all_sublayers > 0
        else [1.0, 1.0]
    )
    kinds = [
        share * all_sublayers * _layer_shares(np.array(layer_times)[:, kind::2])
        for kind, share in enumerate(shares)
    ]
    sublayers = np.stack(kinds, axis=1).ravel()
    # In units of a plain pass.
    relative_costs = Costs(tuple(sublayers.tolist()), overhead, verify=(), curve=curve)
    shares_skipped, lengths, times = (
        np.array(column)
        for column in zip(
            *((relative_costs.skipped_share(m), *rest) for m, *rest in verified), strict=True
        )
    )
    cold, warm = _fit_cold_penalty(shares_skipped, lengths, times)
    first = float(np.median(firsts / (calls + steps))) - 1
    plain_times = [s for block in plain for s in block]
    plain_s = median(plain_times)
    costs = Costs(
        tuple((plain_s * sublayers).tolist()),
        plain_s * overhead,
        tuple(plain_s * t for t in (1.0, *warm)),
        max(0.0, first),
        cold,
        plain_s * call,
        curve,
    )
    low, high = np.quantile(plain_times, (0.25, 0.75))
    errors = tuple(
        abs(costs.draft_step_seconds(mask) / (plain_s * time) - 1)
        for mask, time in zip(masks, checked, strict=True)
    )
    return LatencyEntry(context, costs, float(high - low) / plain_s, errors)


def _attn_mlp_shares(remaining: Sequence[float]) -> tuple[float, list[float]]:
    """Return (exponent, shares of attention and MLP in the time of all sub-layers).

    remaining: the fraction of the time that is left without attention, and that without MLPs.
    Model: without a part of share s, (1 − s)^c of the time is left. The exponent c is chosen so
    that the two shares add up to 1. If the fractions add up to 1 or more, c is 1, and the shares
    are in proportion to their savings.
    """

    def excess(curve: float) -> float:
        return sum(part ** (1 / curve) for part in remaining) - 1

    curve = (
        float(min(np.linspace(1.0, MAX_EXPONENT, 201), key=lambda c: abs(excess(c))))
        if excess(1.0) < 0
        else 1.0
    )
    saved = [max(1 - part ** (1 / curve), 0.0) for part in remaining]
    return curve, [s / sum(saved) for s in saved] if sum(saved) else [0.5, 0.5]


def _mask_schedules(n_skipped: Sequence[int], max_draft: int) -> Iterator[list[tuple[int, int]]]:
    """Yield sweeps: lists of (mask index, tokens to verify after its draft), a pair for each round.

    A sweep runs from the mask that skips least to the mask that skips most, and the next sweep runs
    back. The numbers of tokens are in random order, each about equally often.
    """
    random, up = np.random.default_rng(0), np.argsort(n_skipped, kind="stable")
    count = max(len(n_skipped), max_draft)
    up = up[np.arange(count) * len(n_skipped) // count].repeat(ROUNDS_PER_MASK)
    for order in cycle((up, up[::-1])):
        yield [
            (int(i), int(length) + 1)
            for i, length in zip(order, random.permutation(len(order)) % max_draft, strict=True)
        ]


def _fit_cold_penalty(
    skipped_share: np.ndarray, n_drafted: np.ndarray, times: np.ndarray
) -> tuple[float, list[float]]:
    """Return (cold penalty, verify times, one for each number of drafted tokens).

    The times are those after a draft that skips nothing. After a draft that skips everything, a
    verify pass takes longer by the cold penalty, which is a share of its time.
    skipped_share, n_drafted, times: of each verify pass, [N]. The fit minimises absolute deviations
    of logarithms, so outliers have little effect.
    """
    lengths = np.unique(n_drafted)
    fits = []
    for cold in np.arange(0, MAX_COLD_PENALTY, 0.01):
        logs = np.log(times / (1 + cold * skipped_share))
        warm = [np.median(logs[n_drafted == length]) for length in lengths]
        fits.append(
            (
                sum(
                    np.abs(logs[n_drafted == length] - w).sum()
                    for length, w in zip(lengths, warm, strict=True)
                ),
                cold,
                warm,
            )
        )
    _, cold, warm = min(fits, key=lambda fit: fit[0])
    return float(cold), np.exp(warm).tolist()


class RoundTimer:
    """A timer of passes after `context` tokens of text, in the order of a decode loop."""

    @no_grad
    def __init__(
        self, model: ModelAdapter, max_draft: int, context: int, sampling: SamplingParams = GREEDY
    ):
        self.model, self.device = model, model.spec.device
        self.drafting_model: ModelAdapter = model
        # Of draft tokens and of the full model's.
        self.sampler: TokenSampler = make_sampler(sampling, torch.Generator(self.device))
        self.draft_sampler: TokenSampler = self.sampler
        self.draft_probs: Tensor | None = None  # of the latest sampled draft token, [1, V]
        longest = 1 + max(max_draft, EXTRA_STEPS_IN_CALL)
        if model.spec.context_length is not None:
            # Learned positions end at the context length.
            context = max(1, min(context, model.spec.context_length - longest))
        self.context = context
        capacity = context + longest
        self.cache, self.planner = model.new_cache(1, capacity), Planner(capacity, self.device)
        # Different tokens, because rows of one token would all read the same experts.
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.spec.vocab_size, (1, capacity), generator=random)
        self.tokens = tokens.to(self.device)
        forward(
            model,
            self.tokens[:, :context],
            self.cache,
            self.planner.plan_chain(0, context),
            last_only=True,
        )
        self.cache.length = context
        self.drafts_in_one_call = self._draft_in_one_call(SkipMask(model.spec.n_layers), 1)

    def with_draft(self, drafting_model: ModelAdapter, sampler: TokenSampler) -> RoundTimer:
        """Return a timer whose draft steps run another model, on the same cache."""
        timer = copy(self)
        timer.drafting_model, timer.draft_sampler = drafting_model, sampler
        return timer

    @no_grad
    def time_plain(self) -> float:
        """Return the seconds of a pass over one token, as the mean of several in a row.

        The pass before them is not timed, because it follows another kind of pass.
        """
        self._run_full_pass(1)
        return self._time(lambda: self._run_full_pass(1), CONSECUTIVE_STEPS)

    @no_grad
    def time_round(self, mask: SkipMask, length: int) -> tuple[float, float, float, float]:
        """Time a round that verifies `length` draft tokens.

        A call is one entry into the engine. Some engines draft all steps in one call.
        Returns the seconds of (the first step including its call, the call alone, a later step, the
        verify pass). The call alone is 0 for engines that need a call for each step.
        """
        first, call = self._time(lambda: self._run_draft(mask)), 0.0
        if self.drafts_in_one_call:
            single_step, several_steps = (
                self._time(partial(self._run_draft, mask, steps))
                for steps in (1, 1 + EXTRA_STEPS_IN_CALL)
            )
            later = max(0.0, several_steps - single_step) / EXTRA_STEPS_IN_CALL
            call = max(0.0, single_step - later)
        else:
            later = self._time(lambda: self._run_draft(mask), CONSECUTIVE_STEPS)
        return first, call, later, self._time(lambda: self._run_full_pass(1 + length))

    @no_grad
    def time_sublayers(self) -> list[float]:
        """Return the seconds of each sub-layer, in flat order, which is the order of a pass."""
        plan = self.planner.plan_chain(self.context, 1)
        h = self.model.embed(self.tokens[:, :1], plan.positions)
        return [
            self._time(
                lambda i=i, attn=attn: self.model.block(  # type: ignore[misc]
                    i, h, self.cache, plan, attn=attn, mlp=not attn
                )
            )
            for i in range(self.model.spec.n_layers)
            for attn in (True, False)
        ]

    def _run_full_pass(self, rows: int) -> None:
        tokens = self.tokens[:, :rows]
        logits = forward(
            self.model, tokens, self.cache, self.planner.plan_chain(self.context, rows)
        )
        q = None if self.draft_probs is None else self.draft_probs.expand(rows - 1, -1)
        accept_chain(self.sampler, tokens[0, 1:], q, logits[0])

    def _draft_in_one_call(self, mask: SkipMask, steps: int) -> bool:
        """Run draft steps in one call of the engine; return False if it has no such call."""
        token, sampler = self.tokens[:, :1], self.draft_sampler
        scores = draft_chain(
            self.drafting_model, token, self.cache, self.planner, mask, sampler, steps, 0.0
        )
        if scores is None:
            return False
        self.draft_probs = None if scores.probs is None else scores.probs[-1:]
        return True

    def _run_draft(self, mask: SkipMask, steps: int = 1) -> None:
        """Run draft steps. steps: more than 1 only if the engine drafts in one call."""
        if self.drafts_in_one_call:
            self._draft_in_one_call(mask, steps)
            return
        plan = self.planner.plan_chain(self.context, 1)
        scored = draft_step(
            self.drafting_model,
            self.tokens[:, :1],
            self.cache,
            plan,
            mask,
            self.draft_sampler,
            True,
        )
        _, self.draft_probs = self.draft_sampler.draw(scored)
        assert scored.confidence is not None
        float(scored.confidence)  # exit policies read it, too

    def _time(self, run: Callable[[], object], times: int = 1) -> float:
        """Return the mean seconds of a function over `times` calls in a row."""
        synchronize(self.device)
        started = perf_counter()
        for _ in range(times):
            run()
        synchronize(self.device)
        return (perf_counter() - started) / times


def _layer_shares(seconds: np.ndarray) -> np.ndarray:
    """Return each layer's share [L] of the time of one kind of sub-layer.

    seconds: [repeats, L]. A layer's time is its median over the repeats if this differs clearly
    from the median layer's: by more than the layer's interquartile range plus the median
    interquartile range of all layers. Else it is the median layer's time.
    """
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    typical, scatter = np.median(middle), np.median(high - low)
    layer_s = np.where(np.abs(middle - typical) > (high - low) + scatter, middle, typical)
    total = layer_s.sum()
    shares: np.ndarray = layer_s / total if total > 0 else np.full(len(layer_s), 1 / len(layer_s))
    return shares
