"""The figure that compares methods, from the JSON of `bench methods`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skipsearch.errors import ExportError
from skipsearch.report.figure import ReportFigure, format_number, shorten_label
from skipsearch.report.theme import INK, MUTED, SERIES_COLOURS, themed_figure

Text = Annotated[str, Field(max_length=500)]
MAX_ROWS = 200


class _StoredTableModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class StoredSpeedup(_StoredTableModel):
    """A speedup over plain decoding with its 95 % interval."""

    mean: float = Field(gt=0, lt=1e4)
    low: float = Field(gt=0, lt=1e4)
    high: float = Field(gt=0, lt=1e4)


class StoredMethod(_StoredTableModel):
    """A row of the table, as `bench methods` writes it (`MethodRow`)."""

    method: Text
    recipe: Text
    needs: Text
    published: Text
    speedup: StoredSpeedup
    alpha: float | None
    tau: float | None
    beta: float | None
    identical: int
    prompts: int


class StoredMethodsTable(_StoredTableModel):
    """The speedups of all methods on one model and one task."""

    model: Text
    task: Text
    engine: Text
    dtype: Text
    rows: Annotated[list[StoredMethod], Field(min_length=1, max_length=MAX_ROWS)]


@dataclass(frozen=True)
class MethodsTable:
    """A table of methods with the path of its file."""

    path: Path
    data: StoredMethodsTable

    @property
    def title(self) -> str:
        return f"{self.data.model} on {self.data.task}"

    @property
    def conditions(self) -> str:
        return f"engine {self.data.engine}, {self.data.dtype}"


def read_methods(path: Path) -> MethodsTable:
    """Read a table of methods. Raises: ExportError if the file is not one."""
    try:
        return MethodsTable(
            path, StoredMethodsTable.model_validate(json.loads(path.read_text("utf-8")))
        )
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValidationError, ValueError, RecursionError):
        raise ExportError(
            f"{path} is no table of methods: `skipsearch bench methods --json > FILE` writes one"
        ) from None


def draw_methods(table: MethodsTable, name: str = "methods") -> ReportFigure:
    """Draw a point with its interval for each method, in the order of the table.

    name: of the figure, if a page has several.
    """
    rows = table.data.rows
    with themed_figure() as figure_of:
        figure = figure_of(figsize=(8.4, 0.9 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for k, row in enumerate(rows):
            axes.plot([row.speedup.low, row.speedup.high], [k, k], color=INK, linewidth=1.4)
            axes.plot([row.speedup.mean], [k], "o", color=SERIES_COLOURS[0], gid=f"method-{k}")
        axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="times as fast as plain decoding")
        axes.set_yticks(range(len(rows)), [shorten_label(row.method) for row in rows])
    columns = (
        "method",
        "speedup",
        "95 %",
        "α",
        "τ",
        "β",
        "needs",
        "identical",
        "as published, elsewhere",
        "recipe",
    )
    cells = [
        [
            row.method,
            f"{row.speedup.mean:.2f}×",
            f"{row.speedup.low:.2f}–{row.speedup.high:.2f}",
            format_number(row.alpha),
            format_number(row.tau),
            format_number(row.beta),
            row.needs,
            f"{row.identical} of {row.prompts}",
            row.published,
            row.recipe,
        ]
        for row in rows
    ]
    tips = {
        f"method-{k}": [f"{cell[0]}: {cell[1]} ({cell[2]}), {cell[6]}"]
        for k, cell in enumerate(cells)
    }
    return ReportFigure(name, figure, columns, cells, tips)
