"""Pick the engine that decodes fastest on this machine, among those that need no compiler.

native is picked if it was built before. Otherwise, plain decoding is timed for about one second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from skipsearch.engine.engines import is_native_allowed, switch_engine
from skipsearch.engine.forward import forward, no_grad
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner

MIN_ADVANTAGE = 0.05  # least advantage of another engine over lean; less may be noise
CONTEXT_TOKENS = 128  # tokens in the cache before a measured pass
MIN_REPEATS, MAX_REPEATS = 3, 60  # measured passes of each engine
MAX_SECONDS = 1.0  # of all measured passes after the first MIN_REPEATS

PassTimer = Callable[[Sequence[ModelAdapter]], Sequence[float]]


@dataclass(frozen=True)
class EngineChoice:
    """The model on the engine that was picked, with the measured times."""

    model: ModelAdapter
    # Seconds of a one-token pass by engine; empty if there was only one engine to pick from.
    pass_seconds: dict[str, float] = field(default_factory=dict)


def pick_fastest(model: ModelAdapter, time_engines: PassTimer | None = None) -> EngineChoice:
    """Pick the engine that is fastest at plain decoding.

    If native was built before, it is picked without a comparison: it was the fastest in all
    measurements, and a comparison would need a second copy of the weights. Otherwise lean is
    picked, unless graph, which runs the weights of lean on a GPU, is more than 5 % faster. hf is
    not compared, because its form of the weights would also need a second copy.

    model: as `load_model` returns it for engine auto.
    time_engines: measures seconds of a pass for each model; None: `time_passes`.
    """
    if is_native_allowed() and (native := switch_engine(model, "native")) is not None:
        return EngineChoice(native)
    try:
        graph = switch_engine(model, "graph")
        if graph is None or graph is model:
            return EngineChoice(model)
        seconds = dict(
            zip(
                (model.spec.engine, "graph"),
                (time_engines or time_passes)([model, graph]),
                strict=True,
            )
        )
    except torch.OutOfMemoryError:  # not enough memory to capture passes
        return EngineChoice(model)
    if seconds[model.spec.engine] <= (1 + MIN_ADVANTAGE) * seconds["graph"]:
        return EngineChoice(model, seconds)
    # The measured adapter holds captures of the measurement's cache, so make a new one.
    return EngineChoice(switch_engine(model, "graph") or graph, seconds)


@no_grad
def time_passes(models: Sequence[ModelAdapter]) -> list[float]:
    """Return the median seconds of a one-token pass of each model, after a short context.

    The models take turns. They may share weights.
    """
    runs = [_make_timed_pass(model) for model in models]
    for run in runs:
        run()  # warm-up: kernels are chosen, graphs captured
    times: list[list[float]] = [[] for _ in runs]
    started = perf_counter()
    while len(times[0]) < MIN_REPEATS or (
        len(times[0]) < MAX_REPEATS and perf_counter() - started < MAX_SECONDS
    ):
        for run, seconds in zip(runs, times, strict=True):
            before = perf_counter()
            run()
            seconds.append(perf_counter() - before)
    return [median(seconds) for seconds in times]


def _make_timed_pass(model: ModelAdapter) -> Callable[[], object]:
    """Return a function that runs one decode step and waits for its token.

    The KV cache is all zeros instead of prefilled. The time of attention does not depend on its
    values, and a prefill would take longer than the measurement.
    """
    spec = model.spec
    context = (
        CONTEXT_TOKENS
        if spec.context_length is None
        else max(1, min(CONTEXT_TOKENS, spec.context_length - 1))
    )
    cache = model.new_cache(1, 2 * CONTEXT_TOKENS)
    planner = Planner(2 * CONTEXT_TOKENS, spec.device)
    token = torch.zeros(1, 1, dtype=torch.long, device=spec.device)
    plan = planner.plan_chain(context, 1)
    return lambda: int(forward(model, token, cache, plan)[0, -1].argmax())
