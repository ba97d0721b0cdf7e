"""Skip drafters that choose their mask while they decode: the port of what chooses, and the session that drafts under its choice.

A mask changes between rounds only. The verify pass writes the K/V of every layer, so nothing that an earlier mask left is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from skipsearch.drafters.base import DecodeContext, Draft, WatchingSession
from skipsearch.drafters.skip import Beside, SkipSession
from skipsearch.exits import Exit
from skipsearch.mask import SkipMask

if TYPE_CHECKING:
    from skipsearch.cache import KVCache, PassPlan
    from skipsearch.engine import Tap
    from skipsearch.models.spec import ModelAdapter


class MaskPolicy(Protocol):
    """Chooses the masks of one request."""

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        """As a `WatchingSession` has it."""

    def first(self, ctx: DecodeContext) -> SkipMask:
        """The mask of the first round, once the prompt is in the cache."""

    def next(self, ctx: DecodeContext, path: Sequence[int]) -> SkipMask | None:
        """After every round: the mask from now on; None keeps the one in force. path: as `WatchingSession.committed` is told."""


class ChoosingDrafter:
    """A skip drafter with a policy in the place of a mask. policy: makes one for a request. siblings: of its unsure tokens."""

    def __init__(self, policy: Callable[[], MaskPolicy], exit_policy: Exit, siblings: Beside | None = None):
        self.policy, self.exit, self.siblings = policy, exit_policy, siblings
        self._lasting = exit_policy.begin() if exit_policy.shared else None

    def watch(self) -> WatchingSession:
        skip = SkipSession(SkipMask(1), self._lasting or self.exit.begin(), self.exit.reads_confidence, self.siblings)
        return ChoosingSession(self.policy(), skip)


class ChoosingSession:
    """masks: every mask that it drafted under, with the number of the round from which it was in force."""

    chooses = True

    def __init__(self, policy: MaskPolicy, skip: SkipSession):
        self.policy, self.masks, self.round = policy, list[tuple[int, SkipMask]](), 0
        self._skip = skip   # under a mask of no model, until the first is chosen

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        return self.policy.tap(model, cache, plan, rows)

    def begin(self, ctx: DecodeContext) -> None:
        self._adopt(self.policy.first(ctx))

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        if not self._skip.skipped.n_skipped:   # a draft that skips nothing is the full model, at twice the price
            return None
        return self._skip.draft(ctx, most)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self._skip.verified(ctx, path)

    def committed(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.round += 1
        mask = self.policy.next(ctx, path)
        if mask is not None and mask != self.masks[-1][1]:
            self._adopt(mask)

    def _adopt(self, mask: SkipMask) -> None:
        self.masks.append((self.round, mask))
        self._skip.skipped = mask


def sequential(model: ModelAdapter) -> bool:
    """Whether a layer is its attention, then its MLP on what that made."""
    import torch

    from skipsearch.cache import Planner
    from skipsearch.programme import same

    device = model.spec.device
    with torch.no_grad():
        cache, plan = model.new_cache(1, 1), Planner(1, device).chain(0, 1)
        h = model.embed(torch.zeros(1, 1, dtype=torch.long, device=device), plan.positions)
        apart = model.block(0, model.block(0, h, cache, plan, mlp=False), cache, plan, attn=False)
        return same(apart, model.block(0, h, cache, plan))
