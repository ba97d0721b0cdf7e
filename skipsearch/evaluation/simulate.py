"""Walks rounds under a recipe and counts what real decoding would count: any recipe, one at a time.

`sweep` does the same for many draft policies at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.costs import Costs
from skipsearch.decoding.guard import Guard
from skipsearch.evaluation.lookups import Copied
from skipsearch.evaluation.rounds import Rounds
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.stats import DecodeStats, DrafterStats, Price


@dataclass(frozen=True)
class Prediction:
    """Counts of all prompts together, with predicted decode seconds; seconds and tokens of each prompt for intervals.

    prompts: their numbers in the workload, () where nobody said.
    """

    stats: DecodeStats
    seconds: np.ndarray
    tokens: np.ndarray
    prompts: tuple[int, ...] = ()

    @property
    def seconds_per_token(self) -> float:
        return float(self.seconds.sum() / self.tokens.sum())

    def from_some_to_all(self, prompts: Collection[int]) -> float:
        """Predicted seconds per token of all prompts, over that of some of them. What was measured on some, times this, is an estimate for
        all. 1 where one of them was not predicted."""
        places = [place for place, number in enumerate(self.prompts) if number in prompts]
        if not places or len(places) < len(set(prompts)):
            return 1.0
        return self.seconds_per_token / float(self.seconds[places].sum() / self.tokens[places].sum())

    @property
    def stderr(self) -> float:
        """Standard error over prompts of the ratio of totals (delta method)."""
        n = len(self.tokens)
        if n < 2:
            return 0.0
        residuals = self.seconds - self.seconds_per_token * self.tokens
        return float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / self.tokens.sum())


@dataclass(frozen=True)
class Drafted:
    """One round. by: the place of its drafter in the recipe; n: tokens that it drafted, 0 if nobody drafted any; siblings: tokens that were
    verified beside them."""

    by: int
    n: int
    siblings: int = 0


def walk(rounds: Rounds, policy: DraftPolicy | None, before: Sequence[Copied] = (),
         prices: Sequence[Price | None] = ()) -> tuple[DecodeStats, list[list[Drafted]]]:
    """Counts of real rounds, and the rounds of each prompt.

    policy: of the skip drafter, the last of the recipe; None: it has none. before: the lookups that are asked before it, in order.
    prices: as a decoder's guard has them, so that the same drafters rest in the same rounds; () is no guard.
    Source of the idea: Draft & Verify, algorithms 3 and 4.
    """
    right, sibling, confidence = rounds.right.tolist(), rounds.sibling.tolist(), rounds.confidence.tolist()
    room, left = rounds.room.tolist(), rounds.left.tolist()
    copied = [(c.offered.tolist(), c.right.tolist()) for c in before]
    stats, every = DecodeStats(by_drafter=[DrafterStats() for _ in range(len(before) + (policy is not None))]), []
    session = policy.exit.begin() if policy else None
    for first, length in zip(rounds.first.tolist(), rounds.lengths.tolist(), strict=True):
        at, drafts, guard = first, [], Guard(prices) if any(prices) else None
        if policy and not policy.exit.shared:
            session = policy.exit.begin()
        while at < first + length:
            by = next((i for i, (offered, _) in enumerate(copied)
                       if offered[at] > 0 and room[at] > 0 and not (guard and guard.rests(i))), len(copied))
            drafted, good, siblings, stands_beside = 0, right[at], 0, False
            if by < len(copied):
                drafted, good = min(copied[by][0][at], room[at]), copied[by][1][at]
            elif policy and session and not (guard and guard.rests(by)):
                most = min(policy.draft_length, room[at], rounds.longest)
                while drafted < most:
                    top = confidence[at][drafted]
                    drafted += 1
                    if drafted < most and policy.exit.reads_confidence and session.stop(top, drafted):
                        break
                if drafted:
                    session.observe(min(good, drafted), drafted)
                if policy.siblings:
                    unsure = [c < policy.siblings.below for c in confidence[at][:drafted]]
                    siblings = sum(unsure) * policy.siblings.most
                    stands_beside = good < drafted and unsure[good] and 0 < sibling[at] <= policy.siblings.most
            accepted = good + 1 if stands_beside else min(good, drafted)
            rejected = good < drafted and not stands_beside and (rounds.exact or accepted < left[at])
            if drafted:
                stats.by_drafter[by].count(drafted, accepted, rejected, siblings=siblings)
            if guard:
                guard.passed(by if drafted else None, drafted, accepted, siblings)
            drafts.append(Drafted(by, drafted, siblings))
            stats.rounds += 1
            stats.drafted += drafted
            stats.accepted += accepted
            stats.rejecting_rounds += rejected
            at += accepted + 1
        stats.round_tokens += length
        every.append(drafts)
    stats.tokens = stats.round_tokens + len(every)
    return stats, every


def simulate(rounds: Rounds, mask: SkipMask | None, policy: DraftPolicy | None, costs: Costs, before: Sequence[Copied] = (),
             prices: Sequence[Price | None] = ()) -> Prediction:
    """The same rounds with the latency table's costs. mask: of the skip drafter."""
    stats, drafts = walk(rounds, policy, before, prices)
    most = policy.draft_length * policy.siblings.most if policy and policy.siblings else 0
    cost = [*([costs.trees(None, rounds.longest, 0)] * len(before)), costs.trees(mask, rounds.longest, most)]
    seconds = [sum(cost[r.by][r.siblings][r.n] for r in of_prompt) for of_prompt in drafts]
    stats.decode_seconds = float(sum(seconds))
    for of_prompt in drafts:
        for r in of_prompt:
            if r.n:
                drafting = costs.drafting(mask, r.n) if mask is not None and r.by == len(before) else 0.0
                stats.by_drafter[r.by].draft_seconds += drafting
                stats.by_drafter[r.by].verify_seconds += cost[r.by][r.siblings][r.n] - drafting
    return Prediction(stats, np.array(seconds), rounds.lengths, rounds.prompts)


def prices_of(stats: DecodeStats, plain: float) -> list[Price | None]:
    """What each drafter's rounds cost and brought. plain: seconds of a plain pass."""
    return [Price.counted(d.rounds, d.drafted, d.accepted, d.draft_seconds / max(1, d.drafted) / plain,
                          d.verify_seconds / max(1, d.rounds) / plain, d.siblings) for d in stats.by_drafter]
