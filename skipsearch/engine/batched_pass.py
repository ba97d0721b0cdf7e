"""Run the passes of several requests as one pass over rows of a shared cache.

All passes are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.engine.forward import run_draft_step, run_pass
from skipsearch.engine.shared_cache import RowCache, batch_plans
from skipsearch.models.adapter import DraftScorer, DraftScores, ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan


@dataclass(frozen=True)
class PassRequest:
    """A pass that a request waits for.

    It has the arguments of `forward` or, with a scorer, those of `draft_step`.
    """

    model: ModelAdapter
    tokens: Tensor  # [1, T]
    cache: RowCache
    plan: PassPlan
    mask: SkipMask | None  # None: all sub-layers
    scorer: DraftScorer | None = None  # None: the request waits for logits
    with_confidence: bool = False

    @property
    def group_key(self) -> Hashable:
        """A key that is equal for passes that can run as one."""
        return (
            id(self.model),
            self.mask,
            None if self.scorer is None else (self.scorer.key, self.with_confidence),
        )


def run_batched(requests: Sequence[PassRequest]) -> list[Tensor | DraftScores]:
    """Run passes of equal `group_key` as one; return logits [1, T, V] or scores for each.

    A pass over several requests rounds differently from a pass over one. In float32 and below, a
    near-tie may therefore be decided differently.
    """
    first_request = requests[0]
    cache: KVCache
    tokens, cache, plan, rows = first_request.tokens, first_request.cache, first_request.plan, [0]
    if len(requests) > 1:
        first_row = min(request.cache.first_row for request in requests)
        rows = [request.cache.first_row - first_row for request in requests]
        plans: list[PassPlan | None] = [None] * (max(rows) + 1)
        for row, request in zip(rows, requests, strict=True):
            plans[row] = request.plan
        plan = batch_plans(
            plans, first_request.cache.shared_cache.padding_slot, first_request.tokens.device
        )
        tokens = first_request.tokens.new_zeros(plan.positions.shape)
        for row, request in zip(rows, requests, strict=True):
            tokens[row, : request.tokens.shape[1]] = request.tokens[0]
        cache = first_request.cache.shared_cache.view(first_row, first_row + len(plans))
    if first_request.scorer is None or first_request.mask is None:
        logits = run_pass(first_request.model, tokens, cache, plan, first_request.mask)
        return [
            logits[row : row + 1, : request.tokens.shape[1]]
            for row, request in zip(rows, requests, strict=True)
        ]
    scores = run_draft_step(
        first_request.model,
        tokens,
        cache,
        plan,
        first_request.mask,
        first_request.scorer,
        first_request.with_confidence,
    )
    fields = (scores.choice, scores.probs, scores.confidence)
    return [
        DraftScores(*(None if field is None else field[row : row + 1] for field in fields))
        for row in rows
    ]
