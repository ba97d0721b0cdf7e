"""The draft and verify costs of each engine, from the latency table.

These are β of a draft that runs half of the sub-layers, and v by number of verified tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from skipsearch.bench.llama_cpp import LlamaCpp
from skipsearch.core.reading import Reading
from skipsearch.engine.reduced_model import (
    can_restrict_head,
    list_draft_weights,
    release_draft_copies,
)
from skipsearch.models.adapter import ModelAdapter
from skipsearch.timing.latency import measure_costs
from skipsearch.timing.read_rate import measure_read_rate
from skipsearch.timing.reading_costs import SMALL_HEAD_ROWS, measure_format_costs

MAX_ROWS = 16


@dataclass(frozen=True)
class CostRow:
    """The costs of one engine.

    pass_ms: milliseconds of a plain pass: over one token after `context` other tokens.
    beta_half: time of a draft step with half of the sub-layers over that of a plain pass; None for
    llama.cpp.
    v: times of passes over 2 … 16 tokens over that of a plain pass.
    beta_formats: time of a draft step with nothing skipped over that of a plain pass, by number
    format and rows of the head: `int8`, `int8, 1024 tokens`.
    read_rate: bytes of weights that a plain pass reads per second; None for llama.cpp.
    read_ceiling: bytes per second that a loop over memory reads, measured right after the passes.
    """

    engine: str
    dtype: str
    context: int
    pass_ms: float
    beta_half: float | None
    v: tuple[float, ...]
    beta_formats: dict[str, float] = field(default_factory=dict)
    read_rate: float | None = None
    read_ceiling: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_llama_costs(llama: LlamaCpp, context: int) -> CostRow:
    """Measure the passes of llama.cpp, which runs no skip masks."""
    one, *more = llama.time_rows(MAX_ROWS, context)
    return CostRow("llama.cpp", llama.dtype, context, 1e3 * one, None, tuple(x / one for x in more))


def measure_cost_table(models: Sequence[ModelAdapter], context: int) -> list[CostRow]:
    """Measure the costs of each model on its engine."""
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
                _measure_formats(model, context),
                model.read_bytes / one,
                measure_read_rate(model.spec.device),
            )
        )
    return rows


def _measure_formats(model: ModelAdapter, context: int) -> dict[str, float]:
    """Return β of drafts that read less, by what they read; {} if the engine has no such drafts."""
    formats = [Reading(weights) for weights in list_draft_weights(model)]
    vocab_size = model.spec.vocab_size
    if len(formats) == 1 and not can_restrict_head(model):
        return {}
    betas: dict[str, float] = {}
    for reading, costs in measure_format_costs(model, context, formats).items():
        step = costs.sublayers + costs.overhead  # with a small head
        if can_restrict_head(model) and vocab_size > SMALL_HEAD_ROWS:
            name = "stored" if reading.is_everything else str(reading)
            betas[f"{name}, {SMALL_HEAD_ROWS} tokens"] = step
            step += costs.head_row * (vocab_size - SMALL_HEAD_ROWS)
        if not reading.is_everything:
            betas[str(reading)] = step
    release_draft_copies(model, ())
    return dict(sorted(betas.items(), key=lambda pair: -pair[1]))
