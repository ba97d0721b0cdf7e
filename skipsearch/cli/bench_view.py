"""What `bench` shows to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table

from skipsearch.cli.terminal import Terminal
from skipsearch.core.sizes import format_tokens_per_s

if TYPE_CHECKING:
    from skipsearch.bench import BatchRow, BenchRow, CostRow

HEADINGS = (
    "× FIRST: times as fast as FIRST, with its 95 % interval; identical: prompts with the tokens "
    "of FIRST",
    "M: speed over memory, both relative to FIRST",
    "τ: tokens a round; α: chance that a draft is accepted; accepted: share of all drafted tokens",
    "β, v: time of a drafted token and of a verify pass over that of a plain pass",
)
POSITIONS_SHOWN = 8  # of a draft
ROWS_SHOWN = (2, 3, 4, 6, 8, 12, 16)


def print_rows(console: Terminal, rows: Sequence[BenchRow]) -> None:
    """Print three tables, each narrow enough for 80 columns, and a legend of their headings."""
    first = rows[0].system
    table = _make_table("system", "engine", "ms/token", f"× {first}", "95 %", "identical")
    for r in rows:
        table.add_row(
            r.system,
            r.engine,
            _format_ms(r.ms_per_token),
            f"{r.speedup.mean:.2f}",
            f"{r.speedup.low:.2f}–{r.speedup.high:.2f}",
            f"{r.identical} of {r.prompts}",
        )
    console.print(table)
    console.print()
    table = _make_table(
        "system", "quartiles", "first token", "tokens/s", "with prefill", "memory", "M"
    )
    for r in rows:
        memory = "" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.0f} MB"
        table.add_row(
            r.system,
            "–".join(map(_format_ms, r.ms_per_token_quartiles)),
            f"{r.first_token_ms:.0f} ms",
            format_tokens_per_s(r.tokens_per_second),
            format_tokens_per_s(r.end_to_end_tokens_per_second),
            memory,
            _format_number(r.memory_normalised),
        )
    console.print(table)
    console.print()
    table = _make_table("system", "τ", "α", "accepted", "β", "v")
    for r in rows:
        table.add_row(
            r.system,
            _format_number(r.tau),
            _format_number(r.alpha),
            _format_share(r.accepted_fraction),
            _format_number(r.beta),
            _format_number(r.verify_ratio),
        )
    console.print(table)
    _print_drafters(console, rows)
    by_position = {
        f"{r.system}, {d.kind}": {
            str(i): f"{rate:.2f}"
            for i, rate in enumerate(d.acceptance_by_position[:POSITIONS_SHOWN], 1)
        }
        for r in rows
        for d in r.by_drafter
    }
    _print_breakdown(console, "position", by_position, "α")
    _print_breakdown(
        console,
        "context",
        {r.system: {str(c): _format_ms(ms) for c, ms in r.by_context.items()} for r in rows},
        "ms/token",
    )
    _print_breakdown(
        console,
        "category",
        {r.system: {g: f"{e.mean:.2f}" for g, e in r.by_group.items()} for r in rows},
        f"× {first}",
    )
    console.print()
    for line in HEADINGS:
        console.print(line.replace("FIRST", first), style="dim")


def print_batches(console: Terminal, rows: Sequence[BatchRow]) -> None:
    """Print the table of batch sizes.

    The column `× FIRST` is the speedup over the first system at the same batch size. The column
    `throughput` is the tokens per second divided by those in the first line of the table.
    """
    first = rows[0].system
    table = _make_table(
        "requests",
        "system",
        "engine",
        "tokens/s",
        "throughput",
        f"× {first}",
        "95 %",
        "τ",
        "identical",
    )
    for r in rows:
        table.add_row(
            str(r.requests),
            r.system,
            r.engine,
            format_tokens_per_s(r.tokens_per_second),
            f"{r.against_one:.2f}×",
            f"{r.speedup.mean:.2f}",
            f"{r.speedup.low:.2f}–{r.speedup.high:.2f}",
            _format_number(r.tau),
            f"{r.identical} of {r.prompts}",
        )
    console.print(table)


def print_costs(console: Terminal, rows: Sequence[CostRow]) -> None:
    """Print the draft and verify costs of each engine, if they were measured."""
    if not rows:
        return
    console.print()
    table = _make_table("engine", "context", "ms/pass", "β half", *(f"v {n}" for n in ROWS_SHOWN))
    for r in rows:
        table.add_row(
            r.engine,
            str(r.context),
            _format_ms(r.pass_ms),
            _format_number(r.beta_half),
            *(f"{r.v[n - 2]:.2f}" for n in ROWS_SHOWN),
        )
    console.print(table)
    console.print(
        "β half: a pass with half of the sub-layers, over a whole one; v N: a pass of N tokens, "
        "over one of one",
        style="dim",
    )
    for r in rows:
        if r.read_rate and r.read_ceiling:
            console.print(
                f"memory, {r.engine}, context {r.context}: a plain pass reads weights at "
                f"{r.read_rate / 1e9:.1f} GB/s, {100 * r.read_rate / r.read_ceiling:.0f} % of the "
                f"{r.read_ceiling / 1e9:.1f} GB/s of a loop that only reads"
            )
        if r.beta_formats:
            betas = "; ".join(f"{name} {beta:.2f}" for name, beta in r.beta_formats.items())
            console.print(f"β of drafts that read less, {r.engine}, context {r.context}: {betas}")


def _print_drafters(console: Terminal, rows: Sequence[BenchRow]) -> None:
    """Print what each drafter did, if a recipe has several.

    For a single drafter the tables above have the same figures.
    """
    if all(len(r.by_drafter) < 2 for r in rows):
        return
    console.print()
    table = _make_table("system", "drafter", "of rounds", "drafted", "α", "accepted", "copied")
    for r in rows:
        for i, d in enumerate(r.by_drafter):
            table.add_row(
                r.system if i == 0 else "",
                d.kind,
                _format_share(d.share),
                str(d.drafted),
                _format_number(d.alpha),
                _format_share(d.accepted / d.drafted if d.drafted else None),
                _format_share(d.copied / d.accepted if d.copied else None),
            )
    console.print(table)


def _print_breakdown(
    console: Terminal, what: str, cells: dict[str, dict[str, str]], unit: str
) -> None:
    """Print a table of one figure by context, category or position; nothing if it is empty."""
    columns = list(dict.fromkeys(c for row in cells.values() for c in row))
    if not columns:
        return
    console.print()
    table = _make_table(f"{unit} by {what}", *columns)
    for system, row in cells.items():
        table.add_row(system, *(row.get(c, "") for c in columns))
    console.print(table)


def _make_table(*headings: str) -> Table:
    """Return an empty table.

    If it is wider than the terminal, system names wrap; no cell is truncated.
    """
    return Table(
        *(Column(heading, overflow="fold", no_wrap=i > 0) for i, heading in enumerate(headings)),
        box=None,
        pad_edge=False,
    )


def _format_ms(value: float) -> str:
    """Return milliseconds with four or five digits."""
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _format_share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
