"""What drafting and verifying cost by engine: β of half the sub-layers, and v by rows, from the
latency table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skipsearch.bench.llama_cpp import LlamaCpp
from skipsearch.models.adapter import ModelAdapter
from skipsearch.timing.latency import measure_costs

MAX_ROWS = 16


@dataclass(frozen=True)
class CostRow:
    """pass_ms: a pass over one token, behind `context` others. beta_half: a draft step with half of
    the sub-layers, over it; None without. v: a pass over 2 … 16 rows, over it."""

    engine: str
    dtype: str
    context: int
    pass_ms: float
    beta_half: float | None
    v: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_llama_costs(llama: LlamaCpp, context: int) -> CostRow:
    """What llama.cpp's passes cost; it drafts by no mask."""
    one, *more = llama.time_rows(MAX_ROWS, context)
    return CostRow("llama.cpp", llama.dtype, context, 1e3 * one, None, tuple(x / one for x in more))


def measure_cost_table(models: Sequence[ModelAdapter], context: int) -> list[CostRow]:
    rows = []
    for model in models:
        costs = measure_costs(model, MAX_ROWS - 1, context)
        one = costs.verify[0]
        half = costs.step_seconds(sum(costs.sublayers) / 2)
        rows.append(
            CostRow(
                model.spec.engine,
                model.spec.dtype_name,
                context,
                1e3 * one,
                half / one,
                tuple(x / one for x in costs.verify[1:]),
            )
        )
    return rows
