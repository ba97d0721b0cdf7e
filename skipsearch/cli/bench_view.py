"""What `bench` shows to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from skipsearch.cli.outside import Terminal

if TYPE_CHECKING:
    from skipsearch.bench import BatchRow, BenchRow, CostRow

ROWS_SHOWN = (2, 3, 4, 6, 8, 12, 16)


def print_rows(console: Terminal, rows: Sequence[BenchRow]) -> None:
    """M: speed a memory, both over the first peer's (S3D). of bandwidth: share of what this machine can read. loop: time outside passes."""
    first = rows[0].peer
    table = Table("peer", "engine", "ms/token", "quartiles", f"× {first}", "95 %", "first token", "tokens/s", "with prefill", "identical",
                  box=None, pad_edge=False)
    for r in rows:
        table.add_row(r.peer, r.engine, f"{r.ms_per_token:.2f}", f"{r.ms_per_token_quartiles[0]:.2f}–{r.ms_per_token_quartiles[1]:.2f}",
                      f"{r.speedup.mean:.2f}", f"{r.speedup.low:.2f}–{r.speedup.high:.2f}", f"{r.first_token_ms:.0f} ms",
                      f"{r.tokens_per_second:.0f}", f"{r.end_to_end_tokens_per_second:.0f}", f"{r.identical} of {r.prompts}")
    console.print(table)
    console.print()
    table = Table("peer", "τ", "α", "accepted", "β", "v", "closed form", "memory", "M", "of bandwidth", "loop", box=None, pad_edge=False)
    for r in rows:
        memory = "" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.0f} MB"
        table.add_row(r.peer, _number(r.tau), _number(r.alpha), _share(r.accepted_fraction), _number(r.beta), _number(r.verify_ratio),
                      _number(r.closed_form), memory, _number(r.memory_normalised), _share(r.bandwidth_share), _share(r.loop_overhead))
    console.print(table)
    _print_drafters(console, rows)
    _print_by(console, "context", {r.peer: {str(c): f"{ms:.2f}" for c, ms in r.by_context.items()} for r in rows}, "ms/token")
    _print_by(console, "category", {r.peer: {g: f"{e.mean:.2f}" for g, e in r.by_group.items()} for r in rows}, f"× {first}")


def print_batches(console: Terminal, rows: Sequence[BatchRow]) -> None:
    """× plain: over the first peer with as many requests; throughput: tokens a second over those of the first line."""
    first = rows[0].peer
    table = Table("side by side", "peer", "engine", "tokens/s", "throughput", f"× {first}", "95 %", "τ", "identical", box=None,
                  pad_edge=False)
    for r in rows:
        table.add_row(str(r.requests), r.peer, r.engine, f"{r.tokens_per_second:.0f}", f"{r.against_one:.2f}×", f"{r.speedup.mean:.2f}",
                      f"{r.speedup.low:.2f}–{r.speedup.high:.2f}", _number(r.tau), f"{r.identical} of {r.prompts}")
    console.print(table)


def print_costs(console: Terminal, rows: Sequence[CostRow]) -> None:
    if not rows:
        return
    console.print()
    table = Table("engine", "dtype", "context", "ms/pass", "β of a half", *(f"v {n}" for n in ROWS_SHOWN), box=None, pad_edge=False)
    for r in rows:
        table.add_row(r.engine, r.dtype, str(r.context), f"{r.pass_ms:.2f}", _number(r.beta_half),
                      *(f"{r.v[n - 2]:.2f}" for n in ROWS_SHOWN))
    console.print(table)


def _print_drafters(console: Terminal, rows: Sequence[BenchRow]) -> None:
    """Who drafted what, where a recipe has several drafters; of one alone the table above says it."""
    if all(len(r.by_drafter) < 2 for r in rows):
        return
    console.print()
    table = Table("peer", "drafter", "of rounds", "drafted", "α", "accepted", "copied from the prompt", box=None, pad_edge=False)
    for r in rows:
        for i, d in enumerate(r.by_drafter):
            table.add_row(r.peer if i == 0 else "", d.kind, _share(d.share), str(d.drafted), _number(d.alpha),
                          _share(d.accepted / d.drafted if d.drafted else None), _share(d.copied / d.accepted if d.copied else None))
    console.print(table)


def _print_by(console: Terminal, what: str, cells: dict[str, dict[str, str]], unit: str) -> None:
    columns = list(dict.fromkeys(c for row in cells.values() for c in row))
    if not columns:
        return
    console.print()
    table = Table(f"{unit} by {what}", *columns, box=None, pad_edge=False)
    for peer, row in cells.items():
        table.add_row(peer, *(row.get(c, "") for c in columns))
    console.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
