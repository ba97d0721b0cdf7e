"""Measure the peak memory of a run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from skipsearch.core.machine import synchronize

STATUS_FILE, CLEAR_REFS_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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
