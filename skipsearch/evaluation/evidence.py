"""What searchers are given before the search: cosines, one-at-a-time acceptance, hidden states and a way to run one block on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skipsearch.costs import Costs
from skipsearch.engine import inference, onward
from skipsearch.evaluation.continuations import Batch
from skipsearch.evaluation.replay import Replay
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.searchers.base import Evidence

RANKING_PROMPTS = 16  # that one-at-a-time skipping is ranked on
TRACED_PROMPTS = 4    # whose hidden states are handed out: a dynamic programme over them runs every layer many times


def gather(replay: Replay, costs: Costs, progress: Callable[[int, int], None] = lambda done, total: None) -> Evidence:
    """Everything in `Evidence`, from the continuations that replay holds."""
    n = 2 * replay.model.spec.n_layers
    without = []
    for s in range(n):
        without.append(replay.acceptance(SkipMask.from_sublayers(n // 2, [s]), RANKING_PROMPTS))
        progress(s + 1, n)
    sample = replay.batches.sample(TRACED_PROMPTS)
    states, cosines = trace(replay.model, sample)
    return Evidence(cosines, tuple(without), costs, states, prober(replay.model, sample))


@inference
def trace(model: ModelAdapter, batch: Batch) -> tuple[Tensor, tuple[float, ...]]:
    """([L + 1, N, H] residual stream before each layer and after the last, mean cosine across each sub-layer in flat order).

    N: positions of the batch's text. A layer with a parallel residual computes both from one input, and is taken so.
    """
    real, states, cosines = _real(batch), list[Tensor](), list[float]()

    def look(i: int, h: Tensor) -> None:
        states.append(h[real])
        if i == model.spec.n_layers:
            return
        middle = model.block(i, h, batch.cache, batch.plan, mlp=False)
        for before, after in ((h, middle), (middle, model.block(i, middle, batch.cache, batch.plan, attn=False))):
            cosines.append(float(torch.nn.functional.cosine_similarity(before[real].float(), after[real].float(), dim=-1).mean()))

    onward(model, model.embed(batch.fed, batch.plan.positions), batch.cache, batch.plan, tap=look)
    return torch.stack(states), tuple(cosines)


def prober(model: ModelAdapter, batch: Batch) -> Callable[[int, Tensor, bool, bool], Tensor]:
    """probe(i, states [M, N, H], attn, mlp) -> [M, N, H]: layer i on hidden states of the batch's positions, each position seeing the full
    model's K/V before it and its own, as in replay."""
    real = _real(batch)

    @inference
    def probe(i: int, states: Tensor, attn: bool, mlp: bool) -> Tensor:
        out = torch.empty_like(states)
        h = states.new_zeros(*real.shape, states.shape[-1])  # [B, T, H]; padding stays zero
        for m, state in enumerate(states):
            h[real] = state
            out[m] = model.block(i, h, batch.cache, batch.plan, attn=attn, mlp=mlp)[real]
        return out

    return probe


def _real(batch: Batch) -> Tensor:
    """[B, T] True where a row's text is, False in its padding."""
    real = torch.zeros(batch.fed.numel(), dtype=torch.bool, device=batch.fed.device)
    real[batch.rows] = True
    return real.view_as(batch.fed)
