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

    Readings of the same weights differ in their vocabulary alone, so the same passes judge them. A
    mask is first judged with the weights of the leading reading. If it comes near the best trial so
    far, all weights are compared on a small sample of the prompts. The best of them are then
    judged, too. So further readings take little time.
    """

    fidelity = "replay"

    def __init__(self, objectives: Sequence[ReplayObjective]):
        """objectives: one for each reading, the leading one first."""
        self.leading, self._best_s = objectives[0], inf
        self.by_reading = {objective.reading: objective for objective in objectives}
        for objective in objectives[1:]:
            objective.share_leader(self.leading)
        by_model: dict[int, list[ReplayObjective]] = {}
        for objective in objectives:
            by_model.setdefault(id(objective.replay.drafting_model), []).append(objective)
        self._by_model = list(by_model.values())  # the leading reading's first

    @property
    def readings(self) -> list[Reading]:
        """The readings that masks are judged with, the leading one first."""
        return list(self.by_reading)

    def judge(self, mask: SkipMask) -> Trial:
        """Return the trial of a mask with the reading that suits it best."""
        leading, *others = self._by_model[0]
        best = leading.judge(mask, others)
        if len(self._by_model) > 1 and best.seconds_per_token <= NEAR_BEST * self._best_s:
            first, *others = min(
                self._by_model, key=lambda group: group[0].predict_sample_s(mask, group[1:])
            )
            if first is not leading:
                best = min(best, first.judge(mask, others), key=lambda t: t.seconds_per_token)
        self._best_s = min(self._best_s, best.seconds_per_token)
        return best

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
