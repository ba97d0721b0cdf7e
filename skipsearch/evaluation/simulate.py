"""Walks rounds under an exit policy and a draft length, and counts what real decoding would count: any policy, one at a time.

`sweep` does the same for many policies at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skipsearch.costs import Costs
from skipsearch.evaluation.rounds import Rounds
from skipsearch.exits import Exit
from skipsearch.mask import SkipMask
from skipsearch.stats import DecodeStats


@dataclass(frozen=True)
class Prediction:
    """Counts of all prompts together, with predicted decode seconds; seconds and tokens of each prompt for intervals."""

    stats: DecodeStats
    seconds: np.ndarray
    tokens: np.ndarray

    @property
    def seconds_per_token(self) -> float:
        return float(self.seconds.sum() / self.tokens.sum())

    @property
    def stderr(self) -> float:
        """Standard error over prompts of the ratio of totals (delta method)."""
        n = len(self.tokens)
        if n < 2:
            return 0.0
        residuals = self.seconds - self.seconds_per_token * self.tokens
        return float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / self.tokens.sum())


def walk(rounds: Rounds, exit_policy: Exit, draft_length: int) -> tuple[DecodeStats, list[list[int]]]:
    """Counts of real rounds, and for each prompt how many tokens each of its rounds drafted.

    Source of the idea: Draft & Verify, algorithms 3 and 4.
    """
    session = exit_policy.begin()
    right, confidence = rounds.right.tolist(), rounds.confidence.tolist()
    room, left = rounds.room.tolist(), rounds.left.tolist()
    stats, every = DecodeStats(), []
    for first, length in zip(rounds.first.tolist(), rounds.lengths.tolist(), strict=True):
        at, drafts = first, []
        if not exit_policy.shared:
            session = exit_policy.begin()
        while at < first + length:
            most, drafted = min(draft_length, room[at], rounds.longest), 0
            while drafted < most:
                top = confidence[at][drafted]
                drafted += 1
                if drafted < most and exit_policy.reads_confidence and session.stop(top, drafted):
                    break
            accepted = min(right[at], drafted)
            if drafted:
                session.observe(accepted, drafted)
            drafts.append(drafted)
            stats.rounds += 1
            stats.drafted += drafted
            stats.accepted += accepted
            stats.rejecting_rounds += accepted < drafted and (rounds.exact or accepted < left[at])
            at += accepted + 1
        stats.round_tokens += length
        every.append(drafts)
    stats.tokens = stats.round_tokens + len(every)
    return stats, every


def simulate(rounds: Rounds, mask: SkipMask, exit_policy: Exit, draft_length: int, costs: Costs) -> Prediction:
    """The same rounds with the latency table's costs."""
    stats, drafts = walk(rounds, exit_policy, draft_length)
    price = costs.rounds(mask, rounds.longest)
    seconds = [sum(price[n] for n in of_prompt) for of_prompt in drafts]
    stats.decode_seconds = float(sum(seconds))
    return Prediction(stats, np.array(seconds), rounds.lengths)
