"""Measure how fast a device reads its memory, which limits plain decoding at batch size one."""

from __future__ import annotations

from time import perf_counter

import torch

BUFFER_BYTES = 2**28  # more than caches hold
REPEATS = 7


def measure_read_rate(device: torch.device, n_bytes: int = BUFFER_BYTES) -> float:
    """Return the bytes per second that the fastest of a few sums over a buffer reads.

    On a CPU, it is read by as many threads as torch has.
    """
    buffer = torch.ones(n_bytes // 8, dtype=torch.int64, device=device)
    fastest_s = float("inf")
    for _ in range(REPEATS):
        started = perf_counter()
        int(buffer.sum())  # waits for the device
        fastest_s = min(fastest_s, perf_counter() - started)
    return buffer.nbytes / fastest_s
