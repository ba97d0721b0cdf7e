"""What the pieces of a pass cost on this machine at one context length, from interleaved, synchronised medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine import forward, inference
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.searchers.base import Costs

WARM_UP = 2   # runs of each that do not count


@dataclass(frozen=True)
class Measured:
    """costs at `context` tokens of text. spread: quartile range of a one-token pass over its median.

    errors: |predicted − measured| / measured of a draft step, for each mask that was run beside.
    """

    context: int
    costs: Costs
    spread: float
    errors: tuple[float, ...] = ()


def measure_costs(model: ModelAdapter, max_draft: int, context: int, repeats: int = 15) -> Costs:
    """Seconds of each sub-layer, the overhead and verify passes of 1 … max_draft + 1 rows, at `context` tokens of text."""
    return measure(model, max_draft, context, repeats).costs


@inference
def measure(model: ModelAdapter, max_draft: int, context: int, repeats: int = 15, masks: Sequence[SkipMask] = ()) -> Measured:
    """The costs, and how well they foretell a draft step under each of `masks`.

    All attentions together cost what leaving them all out saves, and so do all MLPs, scaled so that a mask that skips nothing costs what
    a pass over one token does: a layer timed on its own would hide what the loop around it costs. Among themselves they share that by
    their own times, where these differ by more than they scatter. Runs are interleaved, so that a busy moment hits all of them alike.
    """
    n, device = model.spec.n_layers, model.spec.device
    if model.spec.context is not None:
        context = max(1, min(context, model.spec.context - max_draft - 1))  # learned positions end there
    capacity = context + max_draft + 1
    cache, planner = model.new_cache(1, capacity), Planner(capacity, device)
    tokens = torch.zeros(1, capacity, dtype=torch.long, device=device)
    forward(model, tokens[:, :context], cache, planner.chain(0, context), last_only=True)

    def one_token(mask: SkipMask | None) -> Callable[[], object]:
        return lambda: forward(model, tokens[:, :1], cache, planner.chain(context, 1), mask)

    def rows(count: int) -> Callable[[], object]:
        return lambda: forward(model, tokens[:, :count], cache, planner.chain(context, count))

    everything = tuple(range(n))
    runs = {"no attention": one_token(SkipMask(n, attn=everything)), "no mlp": one_token(SkipMask(n, mlp=everything)),
            "nothing": one_token(SkipMask(n, everything, everything))}
    runs |= {f"rows {r}": rows(r) for r in range(1, max_draft + 2)} | {f"mask {i}": one_token(m) for i, m in enumerate(masks)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    alone: list[list[float]] = []
    for repeat in range(repeats + WARM_UP):
        taken = {name: _timed(run, device) for name, run in runs.items()}
        each = _sublayers(model, tokens[:, :1], cache, planner.chain(context, 1))
        if repeat >= WARM_UP:
            alone.append(each)
            for name, seconds in taken.items():
                times[name].append(seconds)
    t = {name: median(values) for name, values in times.items()}
    overhead = min(t["nothing"], t["rows 1"])  # measured, not left over: noise must not make a draft free
    saved = [max(t["rows 1"] - t[name], 0.0) for name in ("no attention", "no mlp")]
    shares = [s / sum(saved) for s in saved] if sum(saved) else [0.5, 0.5]
    kinds = [share * (t["rows 1"] - overhead) * _weights(np.array(alone)[:, kind::2]) for kind, share in enumerate(shares)]
    costs = Costs(tuple(np.stack(kinds, axis=1).ravel().tolist()), overhead, tuple(t[f"rows {r}"] for r in range(1, max_draft + 2)))
    low, high = np.quantile(times["rows 1"], (0.25, 0.75))
    errors = tuple(abs(costs.draft(m) - t[f"mask {i}"]) / t[f"mask {i}"] for i, m in enumerate(masks))
    return Measured(context, costs, float(high - low) / t["rows 1"], errors)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = perf_counter()
    run()
    synchronize(device)
    return perf_counter() - started


def _sublayers(model: ModelAdapter, token: Tensor, cache: KVCache, plan: PassPlan) -> list[float]:
    """Seconds of each sub-layer, one after another as in a pass, in flat order."""
    h, device = model.embed(token, plan.positions), model.spec.device
    return [_timed(lambda i=i, attn=attn: model.block(i, h, cache, plan, attn=attn, mlp=not attn), device)  # type: ignore[misc]
            for i in range(model.spec.n_layers) for attn in (True, False)]


def _weights(seconds: np.ndarray) -> np.ndarray:
    """[repeats, L] of one kind -> each layer's share. Layers within each other's quartile ranges count as equal."""
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    typical, scatter = np.median(middle), np.median(high - low)
    own = np.where(np.abs(middle - typical) > (high - low) + scatter, middle, typical)
    total = own.sum()
    weights: np.ndarray = own / total if total > 0 else np.full(len(own), 1 / len(own))
    return weights


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
