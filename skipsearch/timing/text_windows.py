"""Rows of text for timed passes of a mixture of experts, and the experts that the rows read.

A verify pass reads all experts that any of its rows chooses. Rows of random tokens, or of one
token again and again, choose other experts than rows of text. So the passes of such a model are
timed on text that the model has written itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skipsearch.engine import forward, no_grad
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.experts import count_distinct_experts, pack_experts
from skipsearch.models.families.unmodified import experts_of, record_experts_of
from skipsearch.models.kv_cache import KVCache, Planner

TEXT_TOKENS = 64  # that the model writes
TEXT_WINDOWS = 8  # of its text
_SEED = 0


@dataclass(frozen=True)
class TextWindow:
    """Rows of a timed pass."""

    tokens: Tensor  # [1, R]
    n_experts: tuple[
        int, ...
    ]  # distinct experts that the first 1 … R rows read; () without experts
    is_text: bool = True


@no_grad
def write_text(model: ModelAdapter, length: int = TEXT_TOKENS) -> Tensor:
    """Return tokens [1, length] that the model writes at temperature 1, from token 0 on."""
    device, planner = model.spec.device, Planner(length, model.spec.device)
    cache, tokens = model.new_cache(1, length), torch.zeros(1, length, dtype=torch.long)
    generator = torch.Generator().manual_seed(_SEED)
    for n in range(length - 1):
        row = tokens[:, n : n + 1].to(device)
        logits = forward(model, row, cache, planner.plan_chain(n, 1))[0, -1].float().cpu()
        tokens[0, n + 1] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[0]
        cache.length = n + 1
    return tokens.to(device)


@no_grad
def list_windows(
    model: ModelAdapter, text: Tensor, cache: KVCache, planner: Planner, n_rows: int
) -> list[TextWindow]:
    """Return windows of `n_rows` rows that follow the committed tokens of a cache.

    Every second one repeats a single token. Its rows read few experts, so that a fit sees what an
    expert costs. text: [1, N] of the model.
    """
    experts = experts_of(model)
    if experts is None:
        return [TextWindow(text[:, :n_rows], ())]
    windows = list[TextWindow]()
    plan = planner.plan_chain(cache.length, n_rows)
    for start in np.linspace(0, max(0, text.shape[1] - n_rows), TEXT_WINDOWS).astype(int).tolist():
        ngram = text[:, start : start + n_rows]
        for tokens, is_text in ((ngram, True), (ngram[:, :1].expand(-1, n_rows), False)):
            with record_experts_of(model) as chosen:
                forward(model, tokens, cache, plan)
            counts = count_distinct_experts(pack_experts(chosen, experts.n_experts), n_rows)[0]
            windows.append(TextWindow(tokens, tuple(counts.tolist()), is_text))
    return windows


def average_experts(windows: list[TextWindow]) -> tuple[float, ...]:
    """Return the distinct experts of 1 … R rows of text on average; () without experts."""
    counts = [window.n_experts for window in windows if window.is_text]
    return tuple(np.mean(counts, axis=0).tolist())


def fit_expert_time(rows: np.ndarray, n_experts: np.ndarray, times: np.ndarray) -> float:
    """Return how much longer a pass takes for each further expert, at least 0.

    rows, n_experts, times: of each pass, [N]. Passes over as many rows are compared in pairs; the
    result is the median slope, weighted by the difference in experts (Theil–Sen).
    """
    slopes, weights = list[np.ndarray](), list[np.ndarray]()
    for count in np.unique(rows):
        experts, seconds = n_experts[rows == count], times[rows == count]
        first, second = np.triu_indices(len(experts), 1)
        more = experts[second] - experts[first]
        slopes.append((seconds[second] - seconds[first])[more != 0] / more[more != 0])
        weights.append(abs(more[more != 0]))
    slope, weight = np.concatenate(slopes), np.concatenate(weights)
    if not len(slope):
        return 0.0
    order = slope.argsort()
    middle = np.searchsorted(weight[order].cumsum(), weight.sum() / 2)
    return max(0.0, float(slope[order][middle]))
