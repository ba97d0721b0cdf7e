"""Measure the decode time of a mask on the wall clock."""

from __future__ import annotations

from math import inf

from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import Trial, TrialState
from skipsearch.decoding import Decoder
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.workload import Workload
from skipsearch.timing.interleaved import time_interleaved
from skipsearch.tuning.joint_objective import JointObjective


class WallObjective:
    """An objective that decodes a few prompts in turn, with a mask's best recipe and plainly.

    The time of a trial is the measured ratio times the search's own baseline. If the machine slows
    down, later masks therefore do not look worse.
    """

    fidelity = "wall"

    def __init__(
        self,
        model: ModelAdapter,
        workload: Workload,
        replay_objective: JointObjective,
        baseline_s: float,
    ):
        self.model, self.workload = model, workload
        self.replay_objective = replay_objective
        self.baseline_s = baseline_s  # seconds per token of plain decoding

    def judge(self, mask: SkipMask) -> Trial:
        candidate = self.replay_objective.best_recipe(mask)
        recipe = candidate.recipe
        try:
            plain, drafted = time_interleaved(
                [Decoder(self.model), candidate.make_decoder(self.model)], self.workload
            )
        except DecodeError:
            return Trial(mask, inf, fidelity="wall", state=TrialState.FAILED, recipe=recipe)
        speedup, stats = drafted.speedup_over(plain), drafted.stats
        seconds = self.baseline_s / speedup.mean
        return Trial(
            mask,
            seconds,
            seconds * (speedup.high - speedup.low) / (3.92 * speedup.mean),  # from a 95 % interval
            "wall",
            stats.alpha,
            stats.tau,
            stats.draft_seconds / stats.drafted / plain.seconds_per_token
            if stats.drafted
            else None,
            baseline_seconds_per_token=self.baseline_s,
            recipe=recipe,
        )
