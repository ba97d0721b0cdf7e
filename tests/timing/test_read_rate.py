"""The speed at which memory is read."""

from __future__ import annotations

import torch

from skipsearch.timing import read_rate
from skipsearch.timing.read_rate import measure_read_rate


def test_the_fastest_of_the_sums_counts(monkeypatch) -> None:
    seconds = iter(range(1, 1 + read_rate.REPEATS))
    ends = [moment for n in seconds for moment in (10.0 * n, 10.0 * n + n)]
    monkeypatch.setattr(read_rate, "perf_counter", iter(ends).__next__)
    assert measure_read_rate(torch.device("cpu"), 8_000) == 8_000
