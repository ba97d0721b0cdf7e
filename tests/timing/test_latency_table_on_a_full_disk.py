"""A latency table that finds no room: the one that was kept stays whole, and the search goes on
without keeping the new one.
"""

from __future__ import annotations

from pathlib import Path

from helpers.full_disk import limit_file_size

from skipsearch.searchers.base import Costs
from skipsearch.timing.latency import LatencyEntry
from skipsearch.timing.latency_table import _read_entry, _write_entry


def table(overhead: float) -> LatencyEntry:
    return LatencyEntry(64, Costs((1e-3, 2e-3), overhead, (0.01, 0.02)), 0.05, (0.1,))


def test_the_kept_table_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "latency" / "table.json"
    _write_entry(path, table(0.1))
    kept = path.read_bytes()
    for room in (0, 1, len(kept) - 1):
        with limit_file_size(room):
            _write_entry(path, table(0.2))
        assert path.read_bytes() == kept
    assert _read_entry(path) == table(0.1)
    _write_entry(path, table(0.2))
    assert _read_entry(path) == table(0.2)
