"""Walks replayed positions under an exit policy and a draft length, and counts what real decoding would count.

Nothing is set by hand: how confident the draft stays on its own wrong token, which decides how much it wastes behind a mismatch, is
drawn from the mask's confidences at all positions, in their order. Behind a mismatch the draft goes on with text of its own that is as
plausible to it as any other: on the embedded model 24 % of the confidences there lay under 0.4, 29 % of all, but 64 % of those at the
mismatched positions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.evaluation.replay import Replayed
from skipsearch.exits import ExitPolicy
from skipsearch.mask import SkipMask
from skipsearch.searchers.base import Costs
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


def simulate(replayed: Sequence[Replayed], mask: SkipMask, exit_policy: ExitPolicy, draft_length: int, costs: Costs) -> Prediction:
    """Real rounds over replayed positions. The policy is used up: hand in a fresh one.

    Source of the idea: Draft & Verify, algorithms 3 and 4; costs from the latency table, the verify pass priced by its rows.
    """
    pool = np.concatenate([r.confidence for r in replayed]).tolist()
    draft_cost, verify = costs.draft(mask), costs.verify
    stats, seconds, tokens, drawn = DecodeStats(), [], [], 0
    for replay in replayed:
        agrees, confidence = replay.agrees.tolist(), replay.confidence.tolist()
        at, total, spent = 0, len(agrees), 0.0
        while at < total:
            most = min(draft_length, replay.room - at - 1)
            drafted = accepted = 0
            right = True
            while drafted < most:
                right = right and at + drafted < total  # a draft cannot know that the text is about to end
                if right:
                    right, sure = agrees[at + drafted], confidence[at + drafted]
                    accepted += right
                else:
                    sure, drawn = pool[drawn % len(pool)], drawn + 1
                drafted += 1
                if drafted < most and exit_policy.reads_confidence and exit_policy.stop(sure, drafted):
                    break
            if drafted:
                exit_policy.observe(accepted, drafted)
            at += accepted + 1
            spent += drafted * draft_cost + verify[min(drafted, len(verify) - 1)]
            stats.rounds += 1
            stats.drafted += drafted
            stats.accepted += accepted
            stats.rejecting_rounds += accepted < drafted and at <= total
        stats.round_tokens += total
        seconds.append(spent)
        tokens.append(total)
    stats.tokens = stats.round_tokens + len(tokens)
    stats.decode_seconds = float(sum(seconds))
    return Prediction(stats, np.array(seconds), np.array(tokens))
