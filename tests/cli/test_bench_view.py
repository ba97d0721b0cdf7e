"""The output of `bench` on a terminal."""

from __future__ import annotations

from io import StringIO

import pytest

from skipsearch.bench import BenchRow
from skipsearch.cli.bench_view import print_rows
from skipsearch.cli.terminal import Terminal
from skipsearch.core.sizes import format_tokens_per_s
from skipsearch.core.stats import Estimate


@pytest.mark.parametrize("width", [80, 100])
def test_bench_cuts_no_number_on_a_narrow_terminal(width: int) -> None:
    row = BenchRow(
        "profile:lookup@native",
        "native",
        12345.67,
        (12000.11, 13000.22),
        1234.5,
        123.4,
        100.2,
        Estimate(1.23, 1.11, 1.35),
        10,
        16,
        2.5,
        0.71,
        0.5,
        0.52,
        1.13,
        39_000_000_000,
        1.2,
        [],
        {},
        {128: 12345.67, 4000: 23456.78},
    )
    said = StringIO()
    print_rows(Terminal(file=said, width=width), [row])
    assert "…" not in said.getvalue()
    for number in ("12346", "1.11–1.35", "10 of 16", "12000–13000", "1234 ms", "39000 MB", "23457"):
        assert number in said.getvalue(), number


@pytest.mark.parametrize(("speed", "text"), [(8.449, "8.4"), (99.94, "99.9"), (1234.5, "1234")])
def test_a_slow_models_speed_has_a_decimal(speed: float, text: str) -> None:
    assert format_tokens_per_s(speed) == text
