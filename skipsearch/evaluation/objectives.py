"""The two ways a mask is judged during a search: predicted from replay, or timed on the wall clock."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any, Protocol

from skipsearch.costs import Costs
from skipsearch.decoding import Decoder
from skipsearch.drafters.skip import Skip
from skipsearch.errors import DecodeError
from skipsearch.evaluation.prompts import Workload
from skipsearch.evaluation.replay import Replay, Replayed
from skipsearch.evaluation.rounds import lay_out
from skipsearch.evaluation.simulate import Prediction, simulate
from skipsearch.evaluation.sweep import every, exploring, sweep
from skipsearch.evaluation.wall import race
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter
from skipsearch.recipe import Recipe
from skipsearch.stats import Trial, TrialState

MAX_DRAFT = 12  # Draft & Verify's K
SAMPLES = (12, 6, 3)   # every twelfth batch of continuations, then every sixth, then every third
LEAST_SAMPLED = 6      # prompts below which a sample says too little
BEHIND = 1.0           # standard errors: of two masks that are alike, the new one is dropped at every sixth look


class Objective(Protocol):
    """Judges a mask. fidelity: what its trials are marked with."""

    fidelity: str

    def judge(self, mask: SkipMask) -> Trial:
        """The trial, with the recipe that the mask was judged in."""


def alone(mask: SkipMask, policy: DraftPolicy) -> Recipe:
    """A recipe of one skip drafter."""
    return Recipe((Skip.of(mask, policy.draft_length, policy.exit),))


class ReplayObjective:
    """Predicted seconds per verified token under the best draft policy, from one replay and the latency table.

    A mask that falls behind the best one that this process has judged, on a sample of the prompts and by more than chance explains prompt
    by prompt, is not replayed on the rest: its trial is that of the sample, in proportion to what the best one took there and on all of
    them. So it goes with a twelfth of the prompts (where that is 6 of them), with a sixth, and with a third.
    Source: successive rejection by paired differences, as in F-Race (Birattari et al. 2002).
    """

    fidelity = "replay"

    def __init__(self, replay: Replay, costs: Costs):
        self.replay, self.costs = replay, costs
        self._exploring = exploring(len(costs.verify) - 1)
        self._rungs = _rungs([len(chosen) for chosen in replay.batches.chosen])
        self._leader: list[Prediction] = []   # of the best mask so far, on the prompts of the first rung, of two rungs, …, on all of them

    def afresh(self) -> ReplayObjective:
        """The same, having judged nothing: for another search, which is not to lean on what this one found."""
        return ReplayObjective(self.replay, self.costs)

    def judge(self, mask: SkipMask) -> Trial:
        replayed: list[Replayed] = []
        reached: list[Prediction] = []
        for rung in self._rungs:
            replayed += self.replay(mask, only=rung)
            policy, part = self._best(replayed, mask, self._exploring)
            reached.append(part)
            if self._leader and len(reached) < len(self._rungs):
                theirs = self._leader[len(reached) - 1]
                behind = part.seconds - theirs.seconds   # [prompts so far]
                if behind.sum() > BEHIND * behind.std() * sqrt(len(behind)):
                    return self._trial(mask, policy, part, self._leader[-1].seconds_per_token / theirs.seconds_per_token)
        if not self._leader or part.seconds_per_token < self._leader[-1].seconds_per_token:
            self._leader = reached
        return self._trial(mask, policy, part)

    def _trial(self, mask: SkipMask, policy: DraftPolicy, best: Prediction, scale: float = 1.0) -> Trial:
        return Trial(mask, scale * best.seconds_per_token, scale * best.stderr, "replay", best.stats.alpha, best.stats.tau,
                     self.costs.draft(mask) / self.costs.verify[0], baseline_seconds_per_token=self.costs.verify[0],
                     recipe=alone(mask, policy))

    def best_policy(self, mask: SkipMask, policies: Sequence[DraftPolicy] | None = None) -> tuple[DraftPolicy, Prediction]:
        """The best of these for a mask; of those that a search tries, if none are given. The finalists get `every`."""
        return self._best(self.replay(mask), mask, policies or self._exploring)

    def _best(self, replayed: Sequence[Replayed], mask: SkipMask, options: Sequence[DraftPolicy]) -> tuple[DraftPolicy, Prediction]:
        rounds = lay_out(replayed)
        policy = options[int(sweep(rounds, mask, options, self.costs).sum(axis=1).argmin())]
        return policy, simulate(rounds, mask, policy.exit, policy.draft_length, self.costs)

    def surface(self, mask: SkipMask) -> list[dict[str, Any]]:
        """The predicted speedup of a mask under each fixed length and each confidence threshold."""
        options = [p for p in every(len(self.costs.verify) - 1) if p.exit.kind != "adaptive"]
        rounds = lay_out(self.replay(mask))
        seconds = sweep(rounds, mask, options, self.costs).sum(axis=1) / rounds.lengths.sum()
        return [{"kind": p.exit.kind, "draft_length": p.draft_length, "threshold": getattr(p.exit, "threshold", None),
                 "speedup": self.costs.verify[0] / float(s)} for p, s in zip(options, seconds, strict=True)]


def _rungs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Indices of the batches that each rung adds, of batches of so many prompts; a rung with too few prompts goes into the next."""
    rungs, taken, left = list[tuple[int, ...]](), list[int](), list(range(len(sizes)))
    for nth in SAMPLES:
        taken += (more := [i for i in left if i % nth == 1])   # the shortest texts of all are not in the first
        left = [i for i in left if i not in more]
        if sum(sizes[i] for i in taken) >= LEAST_SAMPLED and left:
            rungs.append(tuple(taken))
            taken = []
    return [*rungs, tuple(sorted([*taken, *left]))]


class WallObjective:
    """Real decoding of a few prompts, interleaved with plain decoding. Time is given in units of the search's own baseline:
    measured ratio × baseline, so that a machine that slows down does not make later masks look worse."""

    fidelity = "wall"

    def __init__(self, model: ModelAdapter, workload: Workload, policy_for: ReplayObjective, baseline: float):
        self.model, self.workload, self.policy_for, self.baseline = model, workload, policy_for, baseline

    def judge(self, mask: SkipMask) -> Trial:
        recipe = alone(mask, self.policy_for.best_policy(mask)[0])
        try:
            plain, ours = race([Decoder(self.model), Decoder(self.model, recipe)], self.workload)
        except DecodeError:
            return Trial(mask, inf, fidelity="wall", state=TrialState.FAILED, recipe=recipe)
        speedup = ours.speedup_over(plain)
        seconds = self.baseline / speedup.mean
        stats = ours.stats
        beta = (stats.draft_seconds / stats.drafted) / plain.seconds_per_token if stats.drafted else None
        return Trial(mask, seconds, seconds * (speedup.high - speedup.low) / (3.92 * speedup.mean), "wall", stats.alpha, stats.tau, beta,
                     baseline_seconds_per_token=self.baseline, recipe=recipe)
