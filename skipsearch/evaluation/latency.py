"""What the pieces of a pass cost on this machine at one context length, from interleaved, synchronised medians.

They are timed as decoding runs them, in rounds: draft steps in a row, each scored, behind a verify pass, and verify passes behind drafts.
A pass that runs again and again finds its weights in the caches, and one among strangers does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter

import numpy as np
import torch

from skipsearch.cache import Planner
from skipsearch.costs import Costs
from skipsearch.decoding.acceptance import accept_greedy
from skipsearch.decoding.sampling import GreedyPicker
from skipsearch.engine import draft_chain, draft_step, forward, inference
from skipsearch.machine import synchronise
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter

WARM_UP = 1      # first run through all masks, which is not counted: memory and clocks settle in it
IN_A_ROW = 2     # draft steps of a round behind its first, and plain passes: about what profiles draft
IN_ONE_CALL = 4  # draft steps beyond one, where an engine drafts in one call
DWELL = 2        # rounds under a mask in a row
PLAIN = 3        # runs of plain passes at each end of a way: everything is compared with them
STEEPEST = 2.0   # curve; no cache is so much faster
MOST_COLD = 1.0  # a pass that takes twice as long behind heavy drafts has other reasons than caches


@dataclass(frozen=True)
class Measured:
    """costs at `context` tokens of text. spread: quartile range of a one-token pass over its median.

    errors: |predicted − measured| / measured of a draft step, for each mask that was run beside.
    """

    context: int
    costs: Costs
    spread: float
    errors: tuple[float, ...] = ()


def measure_costs(model: ModelAdapter, max_draft: int, context: int, repeats: int = 3) -> Costs:
    """Seconds of each sub-layer, the overhead and verify passes of 1 … max_draft + 1 rows, at `context` tokens of text."""
    return measure(model, max_draft, context, repeats).costs


def plain_seconds(model: ModelAdapter, context: int, repeats: int = 9) -> float:
    """Seconds of a pass over one token alone."""
    rounds = _Rounds(model, 0, context)
    rounds.plain()  # warm-up
    return median([rounds.plain() for _ in range(repeats)])


def measure(model: ModelAdapter, max_draft: int, context: int, repeats: int = 3, masks: Sequence[SkipMask] = ()) -> Measured:
    """The costs for drafts of 1 … max_draft tokens, and how well they predict a draft step under each of `masks`.

    All attentions together cost what leaving them all out saves, and so do all MLPs, scaled so that a mask that skips nothing costs what
    a pass over one token does: a layer timed on its own would hide what the loop around it costs. If leaving out either saves more than
    its part, what is left runs from a faster cache (`Costs.curve`). Among themselves they share that by their own times, where these
    differ by more than they scatter.

    A repeat goes from masks that skip little to masks that skip more and more, and back, so that the caches hold what they do under a mask
    that stays. Every run counts in units of the plain passes before and behind its way: a machine that others use as well changes its
    pace within seconds.
    """
    n, rounds = model.spec.n_layers, _Rounds(model, max_draft, context)
    everything = tuple(range(n))
    masks_run = [SkipMask(n, attn=everything), SkipMask(n, mlp=everything), SkipMask(n, everything, everything),
                 *([SkipMask(n)] if rounds.at_once else []), *masks]
    ways = _ways([m.n_skipped for m in masks_run], max_draft)
    for way in islice(ways, WARM_UP):
        for i, drafted in way:
            rounds.round(masks_run[i], drafted)
    plain = [[rounds.plain() for _ in range(PLAIN)]]
    alone: list[np.ndarray] = []
    drafts: list[list[tuple[float, float, float]]] = [[] for _ in masks_run]   # (first step, call, later step)
    verified: list[tuple[SkipMask, int, float]] = []   # (mask, drafted tokens, time)
    for way in islice(ways, 2 * repeats):
        runs = [(i, drafted, rounds.round(masks_run[i], drafted)) for i, drafted in way]
        each = rounds.sublayers()
        plain.append([rounds.plain() for _ in range(PLAIN)])
        pace = median(plain[-2] + plain[-1])
        alone.append(np.array(each) / pace)
        for i, drafted, (*draft, verify) in runs:
            drafts[i].append(tuple(part / pace for part in draft))  # type: ignore[arg-type]
            verified.append((masks_run[i], drafted, verify / pace))
    firsts, calls, steps = np.array([np.median(of_mask, axis=0) for of_mask in drafts]).T   # [masks] each
    call = float(np.median(calls))
    no_attn, no_mlp, nothing, *checked = steps.tolist()
    whole = max(checked.pop(0), nothing) if rounds.at_once else 1.0
    overhead = min(nothing, whole)  # measured, not left over: noise must not make a draft free
    curve, shares = _shares([(max(without, overhead) - overhead) / (whole - overhead) for without in (no_attn, no_mlp)]
                            if whole > overhead else [1.0, 1.0])
    kinds = [share * (whole - overhead) * _weights(np.array(alone)[:, kind::2]) for kind, share in enumerate(shares)]
    sublayers = np.stack(kinds, axis=1).ravel()
    pieces = Costs(tuple(sublayers.tolist()), overhead, verify=(), curve=curve)   # in units of a plain pass
    cold, warm = _cold(*(np.array(column) for column in zip(*((pieces.spared(m), *rest) for m, *rest in verified), strict=True)))
    first = float(np.median(firsts / (calls + steps))) - 1
    seconds = [s for block in plain for s in block]
    one = median(seconds)
    costs = Costs(tuple((one * sublayers).tolist()), one * overhead, tuple(one * t for t in (1.0, *warm)), max(0.0, first), cold,
                  one * call, curve)
    low, high = np.quantile(seconds, (0.25, 0.75))
    errors = tuple(abs(costs.draft(mask) / (one * time) - 1) for mask, time in zip(masks, checked, strict=True))
    return Measured(context, costs, float(high - low) / one, errors)


def _shares(left: Sequence[float]) -> tuple[float, list[float]]:
    """(curve, shares of attention and MLP in the time of all sub-layers), from what is left of that without attention, and without MLP.

    Under a curve c, leaving out a share s leaves (1 − s)^c, and both shares together are 1. Where the two leave more than 1 together, no
    curve says why, and the shares are in the proportion of what they save.
    """
    def missing(curve: float) -> float:
        return sum(part ** (1 / curve) for part in left) - 1

    curve = float(min(np.linspace(1.0, STEEPEST, 201), key=lambda c: abs(missing(c)))) if missing(1.0) < 0 else 1.0
    saved = [max(1 - part ** (1 / curve), 0.0) for part in left]
    return curve, [s / sum(saved) for s in saved] if sum(saved) else [0.5, 0.5]


def _ways(skipped: Sequence[int], max_draft: int) -> Iterator[list[tuple[int, int]]]:
    """(mask, tokens to verify behind it) of each round on the way from the mask that skips least to the one that skips most, then of
    the way back, and so on. Lengths come at random, each about as often as any other."""
    random, up = np.random.default_rng(0), np.argsort(skipped, kind="stable")
    count = max(len(skipped), max_draft)
    up = up[np.arange(count) * len(skipped) // count].repeat(DWELL)
    for way in cycle((up, up[::-1])):
        yield [(int(i), int(length) + 1) for i, length in zip(way, random.permutation(len(way)) % max_draft, strict=True)]


def _cold(spared: np.ndarray, drafted: np.ndarray, times: np.ndarray) -> tuple[float, list[float]]:
    """(share by which a verify pass takes longer behind drafts that spare everything, its time by drafted tokens behind drafts that
    spare nothing), of the verify passes [N]: least absolute deviation, of logarithms, so that a busy moment does not count."""
    lengths = np.unique(drafted)
    found = []
    for cold in np.arange(0, MOST_COLD, 0.01):
        left = np.log(times / (1 + cold * spared))
        warm = [np.median(left[drafted == length]) for length in lengths]
        found.append((sum(np.abs(left[drafted == length] - w).sum() for length, w in zip(lengths, warm, strict=True)), cold, warm))
    _, cold, warm = min(found, key=lambda f: f[0])
    return float(cold), np.exp(warm).tolist()


class _Rounds:
    """Passes behind `context` tokens of text, timed as a decode loop runs them. max_draft: tokens of the longest round."""

    @inference
    def __init__(self, model: ModelAdapter, max_draft: int, context: int):
        self.model, self.device, self.picker = model, model.spec.device, GreedyPicker()
        longest = 1 + max(max_draft, IN_ONE_CALL)
        if model.spec.context is not None:
            context = max(1, min(context, model.spec.context - longest))  # learned positions end there
        self.context = context
        capacity = context + longest
        self.cache, self.planner = model.new_cache(1, capacity), Planner(capacity, self.device)
        self.tokens = torch.zeros(1, capacity, dtype=torch.long, device=self.device)
        forward(model, self.tokens[:, :context], self.cache, self.planner.chain(0, context), last_only=True)
        self.cache.length = context
        self.at_once = draft_chain(model, self.tokens[:, :1], self.cache, self.planner, SkipMask(model.spec.n_layers), self.picker, 1,
                                   0.0) is not None

    @inference
    def plain(self) -> float:
        """Seconds of a pass over one token, in a row of them. The first, which follows another kind of pass, is not counted."""
        self._full(1)
        return self._timed(lambda: self._full(1), IN_A_ROW)

    @inference
    def round(self, mask: SkipMask, length: int) -> tuple[float, float, float, float]:
        """(seconds of the first draft step with its call, of a call without its steps, of each step behind the first, of verifying `length`
        drafted tokens). Calls are counted where the engine drafts in one; elsewhere they belong to the steps."""
        first, call = self._timed(lambda: self._draft(mask)), 0.0
        if self.at_once:
            one, longer = (self._timed(partial(self._draft, mask, steps)) for steps in (1, 1 + IN_ONE_CALL))
            later = max(0.0, longer - one) / IN_ONE_CALL
            call = max(0.0, one - later)
        else:
            later = self._timed(lambda: self._draft(mask), IN_A_ROW)
        return first, call, later, self._timed(lambda: self._full(1 + length))

    @inference
    def sublayers(self) -> list[float]:
        """Seconds of each sub-layer, one after another as in a pass, in flat order."""
        plan = self.planner.chain(self.context, 1)
        h = self.model.embed(self.tokens[:, :1], plan.positions)
        return [self._timed(lambda i=i, attn=attn: self.model.block(i, h, self.cache, plan, attn=attn, mlp=not attn))  # type: ignore[misc]
                for i in range(self.model.spec.n_layers) for attn in (True, False)]

    def _full(self, rows: int) -> None:
        logits = forward(self.model, self.tokens[:, :rows], self.cache, self.planner.chain(self.context, rows))
        accept_greedy(self.tokens[0, 1:rows], logits[0])

    def _draft(self, mask: SkipMask, steps: int = 1) -> None:
        """steps: more than one only where the engine drafts in one call."""
        if self.at_once:
            draft_chain(self.model, self.tokens[:, :1], self.cache, self.planner, mask, self.picker, steps, 0.0)
            return
        plan = self.planner.chain(self.context, 1)
        scored = draft_step(self.model, self.tokens[:, :1], self.cache, plan, mask, self.picker, True)
        self.picker.draw(scored)
        assert scored.confidence is not None
        float(scored.confidence)  # as an exit policy reads it

    def _timed(self, run: Callable[[], object], times: int = 1) -> float:
        """Seconds of one run, of `times` in a row."""
        synchronise(self.device)
        started = perf_counter()
        for _ in range(times):
            run()
        synchronise(self.device)
        return (perf_counter() - started) / times


def _weights(seconds: np.ndarray) -> np.ndarray:
    """[repeats, L] of one kind -> each layer's share. Layers within each other's quartile ranges count as equal."""
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    typical, scatter = np.median(middle), np.median(high - low)
    own = np.where(np.abs(middle - typical) > (high - low) + scatter, middle, typical)
    total = own.sum()
    weights: np.ndarray = own / total if total > 0 else np.full(len(own), 1 / len(own))
    return weights
