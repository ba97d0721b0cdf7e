"""The figure of methods side by side, from what `bench --methods --json` gave."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skipsearch.errors import ExportError
from skipsearch.report.drawn import Drawn, label, number
from skipsearch.report.theme import INK, MUTED, SERIES, style

Text = Annotated[str, Field(max_length=500)]
MOST_ROWS = 200


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Speedup(_Read):
    """Over plain decoding, with its 95 % interval."""

    mean: float = Field(gt=0, lt=1e4)
    low: float = Field(gt=0, lt=1e4)
    high: float = Field(gt=0, lt=1e4)


class Method(_Read):
    """A row of the table, as the command's `MethodRow` wrote it."""

    method: Text
    recipe: Text
    needs: Text
    published: Text
    speedup: Speedup
    alpha: float | None
    tau: float | None
    beta: float | None
    identical: int
    prompts: int


class Methods(_Read):
    """One table: of one model on one task."""

    model: Text
    task: Text
    engine: Text
    dtype: Text
    rows: Annotated[list[Method], Field(min_length=1, max_length=MOST_ROWS)]


@dataclass(frozen=True)
class Table:
    """path: where it was read from."""

    path: Path
    found: Methods

    @property
    def title(self) -> str:
        return f"{self.found.model} on {self.found.task}"

    @property
    def how(self) -> str:
        return f"engine {self.found.engine}, {self.found.dtype}"


def read_methods(path: Path) -> Table:
    """Raises: ExportError for a file that is no such table."""
    try:
        return Table(path, Methods.model_validate(json.loads(path.read_text("utf-8"))))
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValidationError, ValueError, RecursionError):
        raise ExportError(f"{path} is no table of methods: `skipsearch bench --methods --json > FILE` writes one") from None


def methods_side_by_side(table: Table, name: str = "methods") -> Drawn:
    """A point a method with its interval, in the order of the table. name: of the figure, where a page has several."""
    rows = table.found.rows
    with style() as figure_of:
        figure = figure_of(figsize=(8.4, 0.9 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for k, row in enumerate(rows):
            axes.plot([row.speedup.low, row.speedup.high], [k, k], color=INK, linewidth=1.4)
            axes.plot([row.speedup.mean], [k], "o", color=SERIES[0], gid=f"method-{k}")
        axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="times as fast as plain decoding")
        axes.set_yticks(range(len(rows)), [label(row.method) for row in rows])
    columns = ("method", "speedup", "95 %", "α", "τ", "β", "needs", "identical", "as published, elsewhere", "recipe")
    cells = [[row.method, f"{row.speedup.mean:.2f}×", f"{row.speedup.low:.2f}–{row.speedup.high:.2f}", number(row.alpha), number(row.tau),
              number(row.beta), row.needs, f"{row.identical} of {row.prompts}", row.published, row.recipe] for row in rows]
    tips = {f"method-{k}": [f"{cell[0]}: {cell[1]} ({cell[2]}), {cell[6]}"] for k, cell in enumerate(cells)}
    return Drawn(name, figure, columns, cells, tips)
