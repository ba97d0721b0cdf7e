"""The latency table: what it holds. How fast anything is, no test says."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
from helpers.tiny import LAYERS, tiny_llama, tiny_model_and_reference, use_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipsearch import engine
from skipsearch.core.cost_model import Costs, ResumedVerifyCosts
from skipsearch.core.mask import SkipMask
from skipsearch.decoding import acceptor
from skipsearch.engine.sampler import SamplingParams
from skipsearch.models import adapt
from skipsearch.models.adapter import ModelAdapter
from skipsearch.timing import latency
from skipsearch.timing.latency import (
    _attn_mlp_shares,
    _fit_cold_penalty,
    _layer_shares,
    _mask_schedules,
    measure_costs,
    measure_latency,
)
from skipsearch.timing.latency_table import random_masks

bits = st.lists(st.integers(0, 1), min_size=2 * LAYERS, max_size=2 * LAYERS)


@cache
def table() -> Costs:
    return measure_costs(tiny_model_and_reference()[0], max_draft=4, context=20, repeats=3)


def test_there_is_a_price_for_every_sub_layer_and_for_every_number_of_rows() -> None:
    assert len(table().sublayers) == 2 * LAYERS
    assert len(table().verify) == 5
    assert all(v > 0 for v in table().verify)
    assert table().overhead > 0
    assert all(s >= 0 for s in table().sublayers)


def test_layers_that_differ_by_no_more_than_they_scatter_cost_the_same() -> None:
    seconds = np.random.default_rng(0).normal(1.0, 0.05, size=(15, 6))
    np.testing.assert_allclose(_layer_shares(seconds), 1 / 6)
    seconds[:, 2] *= 3
    weights = _layer_shares(seconds)
    assert weights[2] == pytest.approx(3 / 8, rel=0.05)
    assert len(set(np.delete(weights, 2))) == 1
    assert weights.sum() == pytest.approx(1)


def test_layers_that_no_clock_can_see_share_alike() -> None:
    np.testing.assert_allclose(_layer_shares(np.zeros((3, 4))), 1 / 4)


@pytest.mark.parametrize(
    ("pass_s", "repeats"), [(0.002, latency.SHORT_PASS_REPEATS), (0.05, latency.LONG_PASS_REPEATS)]
)
def test_long_passes_are_timed_fewer_times(
    pass_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency.RoundTimer, "time_plain", lambda self: pass_s)
    sweeps: list[tuple[int, int]] = []
    measure_latency(
        tiny_model_and_reference()[0],
        2,
        20,
        progress=lambda done, total: sweeps.append((done, total)),
    )
    assert sweeps == [(n, 2 * repeats) for n in range(2 * repeats)]


def test_masks_that_are_run_beside_tell_how_far_the_table_can_be_believed() -> None:
    masks = random_masks(LAYERS, 5)
    measured = measure_latency(tiny_model_and_reference()[0], 2, 20, repeats=3, masks=masks)
    assert len(measured.errors) == 5
    assert all(e >= 0 for e in measured.errors)
    assert measured.spread >= 0
    assert len(set(masks)) == 5
    assert len({m.n_skipped for m in masks}) > 2


def test_a_draft_that_skips_nothing_costs_what_a_pass_over_one_token_does() -> None:
    assert table().draft_step_seconds(SkipMask(LAYERS)) == pytest.approx(table().verify[0])


def test_a_draft_is_never_free_however_noisy_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.cumsum(np.random.default_rng(0).lognormal(sigma=3, size=10_000)).tolist())
    monkeypatch.setattr("skipsearch.timing.latency.perf_counter", lambda: next(clock))
    for _ in range(5):
        costs = measure_costs(tiny_model_and_reference()[0], max_draft=2, context=4, repeats=1)
        assert (
            costs.draft_step_seconds(SkipMask(LAYERS, tuple(range(LAYERS)), tuple(range(LAYERS))))
            > 0
        )
        assert costs.draft_step_seconds(SkipMask(LAYERS)) == pytest.approx(costs.verify[0])
        assert min(costs.sublayers) >= 0


def test_it_goes_from_light_masks_to_heavy_ones_and_back_and_verifies_every_length_as_often() -> (
    None
):
    skipped = [10, 30, 20]
    up, down, again = islice(_mask_schedules(skipped, 4), 3)
    visited = [skipped[i] for i, _ in up]
    assert visited == sorted(visited)
    assert set(visited) == set(skipped)
    assert [skipped[i] for i, _ in down] == visited[::-1]
    assert [skipped[i] for i, _ in again] == visited
    for way in (up, down, again):
        lengths = [length for _, length in way]
        assert {lengths.count(length) for length in (1, 2, 3, 4)} == {len(way) // 4}


@given(st.sampled_from([0.0, 0.1, 0.3]), st.integers(0, 10))
@settings(max_examples=20, deadline=None)
def test_the_extra_time_of_verify_passes_after_long_drafts_is_estimated_despite_noise(
    truth: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    spared, drafted = random.random(400), random.integers(1, 5, size=400)
    seconds = (5 + drafted) * (1 + truth * spared) * random.lognormal(sigma=0.02, size=400)
    seconds[random.random(400) < 0.1] *= 3
    cold, warm = _fit_cold_penalty(spared, drafted, seconds)
    assert cold == pytest.approx(truth, abs=0.025)
    np.testing.assert_allclose(warm, [6, 7, 8, 9], rtol=0.02)


@given(st.sampled_from([0.0, 0.1, 0.3]), st.integers(0, 10))
@settings(max_examples=20, deadline=None)
def test_where_drafts_spare_nothing_nothing_is_said_about_those_that_do(
    truth: float, seed: int
) -> None:
    cold, _ = _fit_cold_penalty(
        np.zeros(8), np.tile([1, 2], 4), np.random.default_rng(seed).lognormal(sigma=truth, size=8)
    )
    assert cold == 0


@given(bits, st.integers(1, 6), st.floats(0, 0.5), st.floats(0, 0.5))
def test_the_time_of_a_round_is_that_of_draft_steps_and_a_verify_pass_with_cold_penalties(
    chosen: list[int], longest: int, first: float, cold: float
) -> None:
    mask, costs = (
        SkipMask.from_bits(chosen),
        Costs((1.0,) * 2 * LAYERS, 1.0, (9.0, 10.0, 11.0), first, cold),
    )
    rounds, spared = costs.round_seconds(mask, longest), mask.n_skipped / (2 * LAYERS + 1)
    assert len(rounds) == longest + 1
    assert rounds[0] == 9.0, "nothing drafted is plain decoding"
    for drafted in range(1, longest + 1):
        verify = (9.0 + drafted) * (
            1 + cold * spared
        )  # beyond the longest that was measured, by the row
        assert rounds[drafted] == pytest.approx(
            (drafted + first) * costs.draft_step_seconds(mask) + verify
        )


@given(st.floats(0.05, 0.95), st.floats(1.0, 1.9))
def test_a_faster_cache_for_what_is_left_is_read_off_two_masks(
    attention: float, truth: float
) -> None:
    """Without attention the MLPs' share of the time is left, and without MLPs that of attention,
    each to the power of the curve.
    """
    curve, shares = _attn_mlp_shares([(1 - attention) ** truth, attention**truth])
    assert curve == pytest.approx(truth, abs=0.01)
    np.testing.assert_allclose(shares, [attention, 1 - attention], atol=0.01)


@pytest.mark.parametrize("left", [[0.8, 0.7], [1.0, 1.0], [1.0, 0.3]])
def test_what_leaves_more_than_its_part_has_no_curve(left: list[float]) -> None:
    curve, shares = _attn_mlp_shares(left)
    assert curve == 1.0
    assert sum(shares) == pytest.approx(1)


def test_a_curve_makes_light_drafts_cheaper_and_the_whole_pass_stays_what_it_was() -> None:
    straight, curved = (Costs((1.0,) * 2 * LAYERS, 1.0, (9.0,), curve=c) for c in (1.0, 1.3))
    assert curved.draft_step_seconds(SkipMask(LAYERS)) == pytest.approx(
        straight.draft_step_seconds(SkipMask(LAYERS))
    )
    half = SkipMask(LAYERS, tuple(range(LAYERS)))
    assert curved.draft_step_seconds(half) == pytest.approx(1 + 2 * LAYERS * 0.5**1.3)
    every = tuple(range(LAYERS))
    assert (
        curved.draft_step_seconds(SkipMask(LAYERS, every, every))
        == straight.draft_step_seconds(SkipMask(LAYERS, every, every))
        == 1.0
    )


def test_a_draft_in_one_call_pays_for_the_call_once_and_kangaroo_for_each_of_its_steps() -> None:
    costs, mask = Costs((1.0,) * 2 * LAYERS, 1.0, (9.0, 10.0), call=0.5), SkipMask(LAYERS, (0,))
    assert costs.draft_seconds(mask, 3) == pytest.approx(0.5 + 3 * costs.draft_step_seconds(mask))
    assert ResumedVerifyCosts.from_costs(costs, 1).draft_seconds(mask, 3) == pytest.approx(
        3 * (0.5 + costs.draft_step_seconds(mask))
    )
    assert costs.round_seconds(mask, 1)[1] == pytest.approx(
        0.5 + costs.draft_step_seconds(mask) + 10
    )


def test_an_engine_that_drafts_token_by_token_has_no_call_to_pay_for() -> None:
    assert table().call == 0


@pytest.mark.xdist_group("native")
def test_an_engine_that_drafts_in_one_call_is_timed_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that goes by what is computed: a call takes 0.5, the overhead of a step 1, all
    sub-layers together 9.
    """
    now = 0.0

    def forward(model: ModelAdapter, tokens: Tensor, *rest: Any, **named: Any) -> Tensor:
        nonlocal now
        now += 10.5 + 0.1 * (tokens.shape[1] - 1)
        return engine.forward(model, tokens, *rest, **named)

    def draft_chain(
        model: ModelAdapter,
        token: Tensor,
        cache: Any,
        planner: Any,
        mask: SkipMask,
        picker: Any,
        steps: int,
        below: float,
    ) -> Any:
        nonlocal now
        now += 0.5 + steps * (1 + 9 * (1 - mask.n_skipped / (2 * LAYERS)))
        return engine.draft_chain(model, token, cache, planner, mask, picker, steps, below)

    for replaced in (forward, draft_chain):
        monkeypatch.setattr(latency, replaced.__name__, replaced)
    monkeypatch.setattr(latency, "perf_counter", lambda: now)
    with use_engine("native"):
        measured = measure_latency(
            tiny_model_and_reference()[0], 4, 20, repeats=3, masks=random_masks(LAYERS, 5)
        )
    assert measured.costs.call == pytest.approx(0.5)
    assert measured.costs.overhead == pytest.approx(1)
    assert measured.costs.sublayers == pytest.approx((9 / (2 * LAYERS),) * 2 * LAYERS)
    assert measured.costs.verify == pytest.approx((10.5, 10.6, 10.7, 10.8, 10.9))
    assert measured.errors == pytest.approx((0.0,) * 5, abs=1e-6)


@pytest.mark.parametrize("engine", ["hf", "native"])
def test_passes_of_a_task_that_samples_draw_tokens(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[tuple[bool, int, tuple[int, ...]]] = []

    def accept_chain(sampler: Any, draft_tokens: Any, q: Any, logits: Any) -> Any:
        verified.append((sampler.is_greedy, len(draft_tokens), tuple(q.shape) if len(q) else ()))
        return acceptor.accept_chain(sampler, draft_tokens, q, logits)

    monkeypatch.setattr(latency, "accept_chain", accept_chain)
    with use_engine(engine):
        model = tiny_model_and_reference()[0]
        measure_costs(model, 3, 20, repeats=1, sampling=SamplingParams(0.8, top_k=5))
    assert {drafted for _, drafted, _ in verified} == {0, 1, 2, 3}
    for is_greedy, drafted, shape in verified:
        assert not is_greedy
        assert shape == ((drafted, model.spec.vocab_size) if drafted else ())


@given(bits, st.integers(0, 2 * LAYERS - 1))
@settings(deadline=None)  # whoever comes first measures the table
def test_skipping_more_never_costs_more(chosen: list[int], other: int) -> None:
    mask = SkipMask.from_bits(chosen)
    more = mask if other in mask.sublayers else mask.flip(other)
    assert 0 < table().draft_step_seconds(more) <= table().draft_step_seconds(mask)


@pytest.mark.parametrize("context", [1, 30, 500])
def test_it_stays_within_the_context_that_the_model_was_made_for(context: int) -> None:
    highest = []
    model = adapt(tiny_llama(context=32))
    embed = model.embed

    class Watching:
        pass_runner = None
        spec, tokenizer, new_cache, head = (
            model.spec,
            None,
            staticmethod(model.new_cache),
            staticmethod(model.head),
        )

        def block(self, i, h, cache, plan, *, attn=True, mlp=True):  # type: ignore[no-untyped-def]
            highest.append(int(plan.positions.max()))
            return model.block(i, h, cache, plan, attn=attn, mlp=mlp)

        def embed(self, *arguments):  # type: ignore[no-untyped-def]
            return embed(*arguments)

    measure_costs(Watching(), max_draft=4, context=context, repeats=1)
    assert max(highest) < 32
