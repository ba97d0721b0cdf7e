"""The two ways a mask is judged during a search: predicted from replay, or timed on the wall clock."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Protocol

from skipsearch.decoding import Decoder
from skipsearch.errors import DecodeError
from skipsearch.evaluation.prompts import Workload
from skipsearch.evaluation.replay import Replay
from skipsearch.evaluation.simulate import Prediction, simulate
from skipsearch.evaluation.wall import race
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.searchers.base import Costs
from skipsearch.stats import Trial, TrialState

MAX_DRAFT = 12  # Draft & Verify's K


def policies(max_draft: int = MAX_DRAFT) -> Iterator[DraftPolicy]:
    """The draft policies that are tried for a mask: fixed lengths, confidence thresholds, Draft & Verify's adaptive rule."""
    for length in range(1, 9):
        yield DraftPolicy(length)
    for length in (4, 6, 8, max_draft):
        for threshold in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
            yield DraftPolicy(length, "confidence", {"threshold": threshold})
    for target in (0.7, 0.8, 0.9):
        for threshold in (0.4, 0.6):
            yield DraftPolicy(max_draft, "adaptive", {"threshold": threshold, "target_acceptance": target, "step": 0.01,
                                                      "beta1": 0.5, "beta2": 0.9})


class Objective(Protocol):
    """Judges a mask. fidelity: what its trials are marked with."""

    fidelity: str

    def judge(self, mask: SkipMask) -> tuple[Trial, DraftPolicy]:
        """The trial, and the draft policy that it was judged with."""


class ReplayObjective:
    """Predicted seconds per verified token under the best draft policy, from one replay and the latency table."""

    fidelity = "replay"

    def __init__(self, replay: Replay, costs: Costs):
        self.replay, self.costs = replay, costs

    def judge(self, mask: SkipMask) -> tuple[Trial, DraftPolicy]:
        policy, best = self.best_policy(mask)
        return Trial(mask, best.seconds_per_token, best.stderr, "replay", best.stats.alpha, best.stats.tau,
                     self.costs.draft(mask) / self.costs.verify[0], baseline_seconds_per_token=self.costs.verify[0],
                     policy=str(policy)), policy

    def best_policy(self, mask: SkipMask) -> tuple[DraftPolicy, Prediction]:
        replayed = self.replay(mask)
        options = [(p, simulate(replayed, mask, p.make(), p.draft_length, self.costs)) for p in policies(len(self.costs.verify) - 1)]
        return min(options, key=lambda option: option[1].seconds_per_token)


class WallObjective:
    """Real decoding of a few prompts, interleaved with plain decoding. Time is given in units of the search's own baseline:
    measured ratio × baseline, so that a machine that slows down does not make later masks look worse."""

    fidelity = "wall"

    def __init__(self, model: ModelAdapter, workload: Workload, policy_for: ReplayObjective, baseline: float):
        self.model, self.workload, self.policy_for, self.baseline = model, workload, policy_for, baseline

    def judge(self, mask: SkipMask) -> tuple[Trial, DraftPolicy]:
        policy, _ = self.policy_for.best_policy(mask)
        try:
            decoder = Decoder(self.model, mask, draft_length=policy.draft_length, exit_policy=policy.make())
            plain, ours = race([Decoder(self.model), decoder], self.workload)
        except DecodeError:
            return Trial(mask, inf, fidelity="wall", state=TrialState.FAILED), policy
        speedup = ours.speedup_over(plain)
        seconds = self.baseline / speedup.mean
        stats = ours.stats
        beta = (stats.draft_seconds / stats.drafted) / plain.seconds_per_token if stats.drafted else None
        return Trial(mask, seconds, seconds * (speedup.high - speedup.low) / (3.92 * speedup.mean), "wall", stats.alpha, stats.tau, beta,
                     baseline_seconds_per_token=self.baseline, policy=str(policy)), policy
