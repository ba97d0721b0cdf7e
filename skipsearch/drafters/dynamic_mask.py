"""Skip drafters that choose their mask during decoding, by a mask policy.

A mask changes only between rounds. The verify pass writes the K/V of every layer, so K/V that were
written under an earlier mask are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.base import DecodeContext, Draft, DraftSession
from skipsearch.drafters.clasp.dynamic_program import nearly_equal
from skipsearch.drafters.exits import Exit
from skipsearch.drafters.skip.session import SharedExit, SiblingRule, SkipSession
from skipsearch.engine import LayerTap
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner


class MaskPolicy(Protocol):
    """A policy that chooses the masks of one request."""

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        """Return a tap, as `DraftSession.tap` does."""

    def initial_mask(self, ctx: DecodeContext) -> SkipMask:
        """Return the mask of the first round, after the prefill."""

    def next_mask(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> SkipMask | None:
        """Return the mask of the next round; None to keep the current mask.

        accepted_nodes: accepted rows of the verify pass, without row 0, the pending token.
        """


class DynamicMaskDrafter:
    """A skip drafter with a mask policy instead of a fixed mask.

    make_policy: makes the policy of one request. siblings: decides which tokens have siblings.
    """

    def __init__(
        self,
        make_policy: Callable[[], MaskPolicy],
        exit_policy: Exit,
        siblings: SiblingRule | None = None,
    ):
        self.make_policy, self.exit, self.siblings = make_policy, SharedExit(exit_policy), siblings

    def new_session(self) -> DynamicMaskSession:
        skip_session = SkipSession(SkipMask(1), self.exit, self.siblings)
        return DynamicMaskSession(self.make_policy(), skip_session)


class DynamicMaskSession(DraftSession):
    """A session that drafts one request under the masks of a policy.

    mask_history: every mask so far, as (first round with the mask, mask).
    """

    observes_hidden = selects_mask = True

    def __init__(self, policy: MaskPolicy, skip_session: SkipSession):
        self.policy, self.mask_history, self.n_rounds = policy, list[tuple[int, SkipMask]](), 0
        self._skip_session = skip_session  # `begin` sets its first mask

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        return self.policy.tap(model, cache, plan, n_rows)

    def begin(self, ctx: DecodeContext) -> None:
        self._set_mask(self.policy.initial_mask(ctx))

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft | None:
        # A draft that skips nothing would run the full model twice.
        if not self._skip_session.mask.n_skipped:
            return None
        return self._skip_session.draft(ctx, max_tokens)

    def verified(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> None:
        self._skip_session.verified(ctx, accepted_nodes)

    def committed(self, ctx: DecodeContext, accepted_rows: Sequence[int]) -> None:
        self.n_rounds += 1
        mask = self.policy.next_mask(ctx, accepted_rows)
        if mask is not None and mask != self.mask_history[-1][1]:
            self._set_mask(mask)

    def _set_mask(self, mask: SkipMask) -> None:
        self.mask_history.append((self.n_rounds, mask))
        self._skip_session.mask = mask


@torch.no_grad()
def has_sequential_residual(model: ModelAdapter) -> bool:
    """Return whether the MLP of a layer reads the output of the layer's attention."""
    device = model.spec.device
    cache, plan = model.new_cache(1, 1), Planner(1, device).plan_chain(0, 1)
    hidden = model.embed(torch.zeros(1, 1, dtype=torch.long, device=device), plan.positions)
    after_attn = model.block(0, hidden, cache, plan, mlp=False)
    after_both = model.block(0, after_attn, cache, plan, attn=False)
    return nearly_equal(after_both, model.block(0, hidden, cache, plan))
