"""Collect the evidence for searchers: cosines, acceptance, hidden states, a layer probe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.engine import no_grad, run_layers
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.replay import Replay
from skipsearch.replay.replay_batches import ReplayBatch
from skipsearch.replay.segments import MAX_POSITIONS
from skipsearch.searchers.base import Evidence

# Sub-layers that are skipped alone, and on about how many segments. The others follow from their
# cosines.
CONFIRMED_SUBLAYERS = 6
CONFIRMED_SEGMENTS, FEWEST_CONFIRMED_SEGMENTS = 8, 2
# Texts, and positions of each, whose hidden states searchers get. They are few, because a dynamic
# program runs every layer on each of them many times.
TRACED_TEXTS, FEWEST_TRACED_TEXTS, TRACED_POSITIONS = 8, 3, 8
MIN_LOSS, MIN_TURN = 1e-6, 1e-6  # their logarithms are fitted


def collect_evidence(replay: Replay, costs: Costs) -> Evidence:
    """Collect the evidence from the continuations of a replay.

    It takes two passes over a few positions. What takes longer is measured when a searcher asks.
    """
    n_texts = scale_count(TRACED_TEXTS, FEWEST_TRACED_TEXTS, replay.max_positions)
    sample = replay.batches.build_sample(n_texts, TRACED_POSITIONS)
    states, cosines = trace_residual_stream(replay.model, sample)
    return Evidence(
        cosines,
        cache(lambda: estimate_single_skips(replay, cosines)),
        costs,
        states,
        make_layer_probe(replay.model, sample),
    )


def estimate_single_skips(replay: Replay, cosines: Sequence[float]) -> tuple[float, ...]:
    """Return α of the draft that skips each sub-layer alone, in flat order.

    A few sub-layers, from the one that turns the stream least to the one that turns it most, are
    replayed. A power law of 1 − cosine through their losses gives the others. Source: KnapSpec
    (arXiv 2602.20217) relates the cosine of hidden states to acceptance.
    """
    n = len(cosines)
    turns = np.maximum(1 - np.asarray(cosines, dtype=float), MIN_TURN)
    order = turns.argsort()
    confirmed = sorted(
        {int(order[i]) for i in np.linspace(0, n - 1, CONFIRMED_SUBLAYERS).round().astype(int)}
    )
    n_segments = scale_count(CONFIRMED_SEGMENTS, FEWEST_CONFIRMED_SEGMENTS, replay.max_positions)
    alphas = {
        s: replay.measure_acceptance(SkipMask.from_sublayers(n // 2, [s]), n_segments)
        for s in confirmed
    }
    losses = [max(MIN_LOSS, -math.log(max(MIN_LOSS, alphas[s]))) for s in confirmed]
    slope, offset = np.polyfit(np.log(turns[confirmed]), np.log(losses), 1)
    fitted = np.exp(-np.exp(max(0.0, slope) * np.log(turns) + offset))
    return tuple(alphas.get(s, float(fitted[s])) for s in range(n))


def scale_count(count: int, fewest: int, max_positions: int) -> int:
    """Return the part of a count that a slow model has time for.

    max_positions: on which its masks are judged.
    """
    return max(fewest, round(count * max_positions / MAX_POSITIONS))


@no_grad
def trace_residual_stream(
    model: ModelAdapter, batch: ReplayBatch
) -> tuple[Tensor, tuple[float, ...]]:
    """Return the residual stream, and for each sub-layer the mean cosine of its input and output.

    The stream is [L + 1, N, H]: the hidden states before each layer and after the last, at the N
    positions of the batch. The cosines are in flat order: attention and MLP of layer 0, of layer 1,
    and so on. An MLP is measured after the attention of its layer, even if the model has a parallel
    residual.
    """
    real, states, cosines = _valid_mask(batch), list[Tensor](), list[float]()

    def observe(i: int, h: Tensor) -> None:
        states.append(h[real])
        if i == model.spec.n_layers:
            return
        middle = model.block(i, h, batch.cache, batch.plan, mlp=False)
        for before, after in (
            (h, middle),
            (middle, model.block(i, middle, batch.cache, batch.plan, attn=False)),
        ):
            cosines.append(
                float(
                    torch.nn.functional.cosine_similarity(
                        before[real].float(), after[real].float(), dim=-1
                    ).mean()
                )
            )

    run_layers(
        model,
        model.embed(batch.input_ids, batch.plan.positions),
        batch.cache,
        batch.plan,
        tap=observe,
    )
    return torch.stack(states), tuple(cosines)


def make_layer_probe(
    model: ModelAdapter, batch: ReplayBatch
) -> Callable[[int, Tensor, bool, bool], Tensor]:
    """Return a function probe(i, states [M, N, H], attn, mlp) -> [M, N, H].

    It runs layer i on M versions of the hidden states at the batch's N positions. attn, mlp:
    whether it runs these sub-layers. As in replay, a position attends to the full model's K/V at
    earlier positions and to its own K/V.
    """
    real = _valid_mask(batch)

    @no_grad
    def probe(i: int, states: Tensor, attn: bool, mlp: bool) -> Tensor:
        out = torch.empty_like(states)
        h = states.new_zeros(*real.shape, states.shape[-1])  # [B, T, H]; padding stays zero
        for m, state in enumerate(states):
            h[real] = state
            out[m] = model.block(i, h, batch.cache, batch.plan, attn=attn, mlp=mlp)[real]
        return out

    return probe


def _valid_mask(batch: ReplayBatch) -> Tensor:
    """Return which positions of a batch hold text, [B, T]: True for text, False for padding."""
    real = torch.zeros(batch.input_ids.numel(), dtype=torch.bool, device=batch.input_ids.device)
    real[batch.valid_positions] = True
    return real.view_as(batch.input_ids)
