"""Judge each mask with every reading that leads, so that both are searched together."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.objective import ReplayObjective

# A mask whose time with the leading reading is more than this times the best time is not tried with
# the others. Readings that lead differ by as much with nothing skipped.
NEAR_BEST = 1.1


class JointObjective:
    """An objective that judges a mask with several readings and returns the best trial.

    Only a few combinations of number format and vocabulary lead, so all of them are tried
    instead of being modelled as categorical dimensions. Every searcher therefore searches masks,
    bits and vocabulary together, closed forms included. The recipe of a trial names the reading.

    A mask is first judged with the leading reading. If it comes near the best trial so far, all
    readings are compared on a small sample of the prompts. The best of them is then judged, too.
    So further readings take little time.
    """

    fidelity = "replay"

    def __init__(self, objectives: Sequence[ReplayObjective]):
        """objectives: one for each reading, the leading one first."""
        self.leading, self._best_s = objectives[0], inf
        self.by_reading = {objective.reading: objective for objective in objectives}
        for objective in objectives[1:]:
            objective.share_leader(self.leading)

    @property
    def readings(self) -> list[Reading]:
        """The readings that masks are judged with, the leading one first."""
        return list(self.by_reading)

    def judge(self, mask: SkipMask) -> Trial:
        """Return the trial of a mask with the reading that suits it best."""
        best = self.leading.judge(mask)
        if len(self.by_reading) > 1 and best.seconds_per_token <= NEAR_BEST * self._best_s:
            fastest = self._find_fastest(mask)
            if fastest is not self.leading:
                best = min(best, fastest.judge(mask), key=lambda trial: trial.seconds_per_token)
        self._best_s = min(self._best_s, best.seconds_per_token)
        return best

    def _find_fastest(self, mask: SkipMask) -> ReplayObjective:
        """Return the objective that predicts the least time of a mask on a small sample."""
        by_model: dict[int, list[ReplayObjective]] = {}
        for one in self.by_reading.values():
            by_model.setdefault(id(one.replay.drafting_model), []).append(one)
        predicted = [
            (seconds, one)
            for group in by_model.values()
            for seconds, one in zip(group[0].predict_samples_s(mask, group), group, strict=True)
        ]
        return min(predicted, key=lambda pair: pair[0])[1]

    def best_recipe(self, mask: SkipMask) -> Candidate:
        """Return the best recipe with this mask among the settings of the mask search."""
        candidates = (objective.best_recipe(mask) for objective in self.by_reading.values())
        return min(candidates, key=lambda candidate: candidate.seconds_per_token)

    def objective_of(self, recipe: Recipe | None) -> ReplayObjective:
        """Return the objective for the reading of a recipe's last drafter.

        The leading one, if it has another reading.
        """
        if recipe is None or not recipe.drafters:
            return self.leading
        return self.by_reading.get(recipe.drafters[-1].reading, self.leading)
