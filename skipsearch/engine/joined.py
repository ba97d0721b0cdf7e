"""Passes of several requests as one: rows of a shared cache, padded to the longest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.engine.forward import alone, step_alone
from skipsearch.engine.rows import RowCache, joined_plan
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter, Scored, Scorer


@dataclass(frozen=True)
class Wanted:
    """A pass that a request waits for, as `forward` is asked for it, or `draft_step` where there is a scorer."""

    model: ModelAdapter
    tokens: Tensor
    cache: RowCache
    plan: PassPlan
    mask: SkipMask | None
    scorer: Scorer | None = None
    confidence: bool = False

    @property
    def kind(self) -> Hashable:
        """Equal for passes that can be one."""
        return id(self.model), self.mask, None if self.scorer is None else (self.scorer.key, self.confidence)


def together(wanted: Sequence[Wanted]) -> list[Tensor | Scored]:
    """What each of these passes of one kind gives: logits [1, T, V], or scores.

    A pass over several rows rounds otherwise than one over a single row, so in fp32 and below a near-tie may fall otherwise.
    """
    one = wanted[0]
    cache: KVCache
    tokens, cache, plan, rows = one.tokens, one.cache, one.plan, [0]
    if len(wanted) > 1:
        first = min(w.cache.first for w in wanted)
        rows = [w.cache.first - first for w in wanted]
        plans: list[PassPlan | None] = [None] * (max(rows) + 1)
        for row, w in zip(rows, wanted, strict=True):
            plans[row] = w.plan
        plan = joined_plan(plans, one.cache.shared.spare, one.tokens.device)
        tokens = one.tokens.new_zeros(plan.positions.shape)
        for row, w in zip(rows, wanted, strict=True):
            tokens[row, :w.tokens.shape[1]] = w.tokens[0]
        cache = one.cache.shared.part(first, first + len(plans))
    if one.scorer is None or one.mask is None:
        logits = alone(one.model, tokens, cache, plan, one.mask)
        return [logits[row:row + 1, :w.tokens.shape[1]] for row, w in zip(rows, wanted, strict=True)]
    scored = step_alone(one.model, tokens, cache, plan, one.mask, one.scorer, one.confidence)
    sure = scored.confidence
    return [Scored(scored.weights[row:row + 1], None if sure is None else sure[row:row + 1]) for row in rows]
