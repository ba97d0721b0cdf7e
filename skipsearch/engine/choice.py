"""Which engine decodes fastest here, among those that are ready: native where it was built, else a second of plain decoding decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from skipsearch.cache import Planner
from skipsearch.engine.forward import forward, inference
from skipsearch.engine.load import current
from skipsearch.models.lean import LeanAdapter
from skipsearch.models.spec import ModelAdapter

MARGIN = 0.05                     # by which another has to be faster than lean: less may be noise
CONTEXT = 128                     # tokens before the one of each pass
LEAST, MOST, SECONDS = 3, 60, 1.0   # passes of each engine: so many at least, at most, and for so long

Timing = Callable[[Sequence[ModelAdapter]], Sequence[float]]


@dataclass(frozen=True)
class Choice:
    """seconds: of a one-token pass, by engine; empty where only one engine was ready, so that nothing was measured."""

    model: ModelAdapter
    seconds: dict[str, float] = field(default_factory=dict)


def fastest(model: ModelAdapter, timing: Timing | None = None) -> Choice:
    """The engine that is fastest at plain decoding: native where it was built, which takes the weights over and is compared with nothing,
    having been the fastest wherever it was measured; else lean, unless graph, which drives lean's weights on a GPU, is faster by more
    than 5 %.

    model: as `load_model` with engine auto gives it. hf holds the weights in another form, so comparing it would cost a second copy of
    them: it is ready only where lean cannot drive the model.
    """
    if native_is_wanted() and (native := ready(model, "native")) is not None:
        return Choice(native)
    graph = ready(model, "graph")
    if graph is None or graph is model:
        return Choice(model)
    try:
        seconds = dict(zip((model.spec.engine, "graph"), (timing or pass_seconds)([model, graph]), strict=True))
    except torch.OutOfMemoryError:   # no room to record
        return Choice(model)
    if seconds[model.spec.engine] <= (1 + MARGIN) * seconds["graph"]:
        return Choice(model, seconds)
    # A graph adapter holds what it recorded, and the cache that it measured in with it: another one begins with nothing.
    return Choice(ready(model, "graph") or graph, seconds)


def ready(model: ModelAdapter, engine: str) -> ModelAdapter | None:
    """The model under that engine, if that takes neither a compiler nor a second copy of the weights; None otherwise.

    native takes the weights of `model` over, which goes on computing with them, more slowly than before.
    """
    engine = current(engine)
    if model.spec.engine == engine:
        return model
    if not isinstance(model, LeanAdapter):
        return None
    if engine == "graph" and model.spec.device.type == "cuda":
        from skipsearch.engine.graph import GraphAdapter

        return GraphAdapter(model)
    if engine == "native":
        from skipsearch.engine.native import ready_model

        return ready_model(model)
    return None


def native_is_wanted() -> bool:
    """Whether `auto` may take the engine native, and build it: not where the environment says SKIPSEARCH_NATIVE=0."""
    return os.environ.get("SKIPSEARCH_NATIVE") != "0"


@inference
def pass_seconds(models: Sequence[ModelAdapter]) -> list[float]:
    """Median seconds of a pass over one token behind a short context, by model, in turns. They share their weights."""
    runs = [_pass_of(model) for model in models]
    for run in runs:
        run()   # kernels are chosen, graphs recorded
    times: list[list[float]] = [[] for _ in runs]
    started = perf_counter()
    while len(times[0]) < LEAST or (len(times[0]) < MOST and perf_counter() - started < SECONDS):
        for run, found in zip(runs, times, strict=True):
            before = perf_counter()
            run()
            found.append(perf_counter() - before)
    return [median(found) for found in times]


def _pass_of(model: ModelAdapter) -> Callable[[], object]:
    """A pass that ends when its token is known. The context is all zeros, as a new cache is: what is attended to takes its time whatever it
    holds, and a prefill would take longer than what is measured."""
    spec = model.spec
    context = CONTEXT if spec.context is None else max(1, min(CONTEXT, spec.context - 1))
    cache, planner = model.new_cache(1, 2 * CONTEXT), Planner(2 * CONTEXT, spec.device)
    token, plan = torch.zeros(1, 1, dtype=torch.long, device=spec.device), planner.chain(context, 1)
    return lambda: int(forward(model, token, cache, plan)[0, -1].argmax())
