"""Passes of a mixture of experts are timed on text and priced by the experts that they read."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.tiny import tiny_llama
from helpers.tiny_experts import tiny_experts

from skipsearch.engine import forward, no_grad
from skipsearch.models import adapt
from skipsearch.models.experts import count_distinct_experts, pack_experts
from skipsearch.models.families.unmodified import record_experts_of
from skipsearch.models.kv_cache import Planner
from skipsearch.timing.latency import RoundTimer, measure_costs
from skipsearch.timing.text_windows import average_experts, fit_expert_time, write_text


def test_sets_of_rows_are_united_layer_by_layer() -> None:
    layers = [torch.tensor([[0, 8], [0, 1], [9, 8]]), torch.tensor([[3, 4], [4, 3], [5, 0]])]
    sets = pack_experts(layers, 10)
    assert sets.shape == (3, 2, 2)
    # rows: 2 + 2, then {0, 8, 1} and {3, 4}, then {0, 8, 1, 9} and {3, 4, 5, 0}
    assert count_distinct_experts(sets, 4).tolist() == [[4, 5, 8, 8], [4, 8, 8, 8], [4, 4, 4, 4]]


def test_the_price_of_an_expert_is_found_among_outliers() -> None:
    random = np.random.default_rng(0)
    rows = random.integers(1, 5, 300)
    experts = random.integers(10, 30, 300)
    times = 1.0 + 0.3 * rows + 0.02 * experts + 0.01 * random.standard_normal(300)
    times[::20] *= 3
    assert fit_expert_time(rows, experts, times) == pytest.approx(0.02, rel=0.1)
    assert fit_expert_time(rows, experts, 1.0 - 0.01 * experts) == 0.0
    assert fit_expert_time(rows, np.zeros(300), times) == 0.0


def test_windows_count_the_experts_of_the_pass_that_is_timed() -> None:
    model = adapt(tiny_experts("mixtral"))
    timer = RoundTimer(model, 4, 20)
    assert any(window.is_text for window in timer.windows)
    for window in timer.windows:
        for rows in (1, 3, 5):
            with record_experts_of(model) as chosen:
                plan = Planner(32, torch.device("cpu")).plan_chain(20, rows)
                no_grad(forward)(model, window.tokens[:, :rows], timer.cache, plan)
            distinct = sum(len(set(layer.flatten().tolist())) for layer in chosen)
            assert distinct == window.n_experts[rows - 1]
    text = average_experts(timer.windows)
    assert text[0] == 9.0
    assert sorted(text) == list(text)
    repeated = [w.n_experts[-1] for w in timer.windows if not w.is_text]
    assert np.mean(repeated) < text[-1]


def test_text_is_the_same_each_time_and_no_single_token() -> None:
    model = adapt(tiny_experts("olmoe"))
    assert torch.equal(write_text(model, 12), write_text(model, 12))
    assert len(set(write_text(model, 12)[0].tolist())) > 4


def test_costs_name_the_experts_that_were_read() -> None:
    costs = measure_costs(adapt(tiny_experts("olmoe")), 3, 8, repeats=1)
    assert len(costs.experts) == 4
    assert costs.experts[0] == 9.0
    assert costs.expert_s >= 0
    dense = measure_costs(adapt(tiny_llama()), 3, 8, repeats=1)
    assert (dense.experts, dense.expert_s) == ((), 0.0)
    with patch("skipsearch.timing.latency.write_text", side_effect=AssertionError):
        RoundTimer(adapt(tiny_llama()), 2, 8)
