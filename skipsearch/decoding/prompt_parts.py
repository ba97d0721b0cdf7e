"""Read a long prompt part by part, so that other requests get rounds in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

from skipsearch.core.machine import synchronize
from skipsearch.decoding.prefix_cache import Lease
from skipsearch.engine import forward, forward_exact, no_grad
from skipsearch.models.adapter import ModelAdapter


def read_parts(
    model: ModelAdapter, prompt: Sequence[int], lease: Lease, n_rows: int, exact: bool
) -> Iterator[float]:
    """Compute the K/V of a prompt, `n_rows` tokens a pass, until at most `n_rows` are left.

    Yields the seconds of each pass.
    """
    while len(prompt) - lease.cache.length > n_rows:
        began = perf_counter()
        _read_part(model, prompt, lease, n_rows, exact)
        synchronize(model.spec.device)
        yield perf_counter() - began


@no_grad
def _read_part(
    model: ModelAdapter, prompt: Sequence[int], lease: Lease, n_rows: int, exact: bool
) -> None:
    cache, planner = lease.cache, lease.planner
    start = cache.length
    rows = torch.tensor([list(prompt[start : start + n_rows])], device=model.spec.device)
    if exact:
        forward_exact(model, rows, cache, planner, start, last_only=True)
    else:
        forward(model, rows, cache, planner.plan_chain(start, n_rows), last_only=True)
    cache.length = start + n_rows
