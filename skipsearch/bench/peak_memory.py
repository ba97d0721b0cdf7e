"""What a pass reads and what a run takes: bytes a token, the speed at which this machine reads, and
the peak beside the weights.
"""

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
    """Bytes that one token of plain decoding reads: every weight but the embedding table's other
    rows, and K/V of `context` tokens.
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
    """Bytes a second at which a sum reads a buffer as large as the model, cached or not as it would
    be; the best of several.

    A sum does nothing but read, so it bounds what any decoder can do.
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
    """Most bytes that a run takes beside what is there before it: its cache, its buffers. None
    where the system does not tell.
    """
    # garbage that went in the middle of the run would hide as much of what the run takes
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    try:
        CLEAR_REFS_FILE.write_text(
            "5"
        )  # the high-water mark starts again from what is resident now
        before = _read_status("VmRSS")
        run()
        return max(0, _read_status("VmHWM") - before)
    except (OSError, KeyError, ValueError):
        return None


def _read_status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS_FILE.read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) * 1024
