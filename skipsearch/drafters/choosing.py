"""Skip drafters that choose their mask while they decode: the port of what chooses, and the session that drafts under its choice.

A mask changes between rounds only. The verify pass writes the K/V of every layer, so nothing that an earlier mask left is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from skipsearch.drafters.base import DecodeContext, Draft, WatchingSession
from skipsearch.drafters.skip import SkipSession
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
    """A skip drafter with a policy in the place of a mask. policy: makes one for a request."""

    def __init__(self, policy: Callable[[], MaskPolicy], exit_policy: Exit):
        self.policy, self.exit = policy, exit_policy
        self._lasting = exit_policy.begin() if exit_policy.shared else None

    def watch(self) -> WatchingSession:
        return ChoosingSession(self.policy(), self.exit, self._lasting or self.exit.begin())


class ChoosingSession:
    """masks: every mask that it drafted under, with the number of the round from which it was in force."""

    def __init__(self, policy: MaskPolicy, exit_policy: Exit, exit_session: object):
        self.policy, self.masks, self.round = policy, list[tuple[int, SkipMask]](), 0
        self._skip: SkipSession | None = None
        self._exit, self._exits = exit_policy, exit_session

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        return self.policy.tap(model, cache, plan, rows)

    def begin(self, ctx: DecodeContext) -> None:
        self._adopt(self.policy.first(ctx))

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        assert self._skip is not None
        if not self._skip.skipped.n_skipped:   # a draft that skips nothing is the full model, at twice the price
            return None
        return self._skip.draft(ctx, most)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        assert self._skip is not None
        self._skip.verified(ctx, path)

    def committed(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.round += 1
        mask = self.policy.next(ctx, path)
        if mask is not None and mask != self.masks[-1][1]:
            self._adopt(mask)

    def _adopt(self, mask: SkipMask) -> None:
        self.masks.append((self.round, mask))
        if self._skip is None:
            self._skip = SkipSession(mask, self._exits, self._exit.reads_confidence, None)
        else:
            self._skip.skipped = mask
