"""A latency table that nobody measured: for searches whose times do not matter, since measuring
takes longer than all the rest of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from skipsearch.core.cost_model import Costs
from skipsearch.models import ModelAdapter
from skipsearch.tuning import calibration
from skipsearch.tuning.objective import MAX_DRAFT


def fake_costs(model: ModelAdapter, *_: Any, **__: Any) -> Costs:
    """Replace `calibration.measure_task_costs`.

    Attention takes a little longer than an MLP, and one more row takes little time.
    """
    n = model.spec.n_layers
    return Costs(
        (1.2e-3, 0.8e-3) * n,
        1e-3,
        tuple((2e-3 * n + 1e-3) * (1 + 0.03 * rows) for rows in range(MAX_DRAFT + 1)),
    )


@pytest.fixture
def made_up_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_task_costs", fake_costs)
