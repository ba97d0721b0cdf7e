"""The latency table: what the pieces of a pass cost on this machine, from interleaved, synchronised medians."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from skipsearch.cache import Planner
from skipsearch.engine import forward, inference
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.searchers.base import Costs


@inference
def measure_costs(model: ModelAdapter, max_draft: int, context: int, repeats: int = 15) -> Costs:
    """Seconds of attention, MLP, overhead and verify passes of 1 … max_draft + 1 rows, at `context` tokens of text.

    The sub-layers share what a pass costs beyond one that skips them all, by what it saves to leave out all of a kind: a layer timed
    on its own would hide what the loop around it costs. Runs are interleaved, so that a busy moment hits all of them alike.
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

    every = tuple(range(n))
    runs = {"no attention": one_token(SkipMask(n, attn=every)), "no mlp": one_token(SkipMask(n, mlp=every)),
            "nothing": one_token(SkipMask(n, every, every))} | {f"rows {r}": rows(r) for r in range(1, max_draft + 2)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            synchronize(device)
            started = perf_counter()
            run()
            synchronize(device)
            if repeat >= 2:  # warm-up
                times[name].append(perf_counter() - started)
    t = {name: median(values) for name, values in times.items()}
    overhead = min(t["nothing"], t["rows 1"])  # measured, not left over: noise must not make a draft free
    saved = [max(t["rows 1"] - t[name], 0.0) for name in ("no attention", "no mlp")]
    shares = [s / sum(saved) for s in saved] if sum(saved) else [0.5, 0.5]
    attention, mlp = (share * (t["rows 1"] - overhead) / n for share in shares)
    return Costs((attention, mlp) * n, overhead, tuple(t[f"rows {r}"] for r in range(1, max_draft + 2)))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
