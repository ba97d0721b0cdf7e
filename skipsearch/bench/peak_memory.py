"""Measure memory: bytes that a pass reads per token, read bandwidth, and peak memory of a run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from skipsearch.core.machine import synchronize
from skipsearch.engine import forward, no_grad
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner

STATUS_FILE, CLEAR_REFS_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def bytes_per_token(model: ModelAdapter, context: float) -> float:
    """Return the bytes that one token of plain decoding reads.

    These are all weights and the K/V of `context` tokens. If the embedding is not also the head,
    only one row of it counts.
    """
    spec = model.spec
    cache = model.new_cache(1, 8)
    no_grad(forward)(
        model,
        torch.zeros(1, 2, dtype=torch.long, device=spec.device),
        cache,
        Planner(8, spec.device).plan_chain(0, 2),
    )
    one_token = cache.nbytes / cache.capacity
    return model.read_bytes + one_token * context


def measure_bandwidth(device: torch.device, buffer_bytes: float, repeats: int = 15) -> float:
    """Return the bytes per second at which a sum reads a buffer, the best of `repeats` runs.

    buffer_bytes: size of the buffer. If it has the size of the model, it uses the CPU caches as the
    weights do. A sum only reads, so this is an upper bound for any decoder.
    """
    buffer = torch.ones(int(max(buffer_bytes, 1e6)) // 4, device=device)
    times = []
    for _ in range(repeats):
        synchronize(device)
        started = perf_counter()
        buffer.sum()
        synchronize(device)
        times.append(perf_counter() - started)
    return buffer.nbytes / min(times)


def measure_peak_memory(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that a run has allocated at a time, such as its KV cache and buffers.

    What was allocated before the run does not count. Returns None if the platform does not report
    memory.
    """
    # If garbage is freed during the run, the measured peak is too low by its size.
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    try:
        CLEAR_REFS_FILE.write_text("5")  # reset the peak (VmHWM) to the present resident size
        before = _read_status("VmRSS")
        run()
        return max(0, _read_status("VmHWM") - before)
    except (OSError, KeyError, ValueError):
        return None


def _read_status(field: str) -> int:
    """Return the value of a field in /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in STATUS_FILE.read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) * 1024
