"""Judge each mask with every reading that leads, so that both are searched together."""

from __future__ import annotations

from collections.abc import Sequence

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Reading
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Trial
from skipsearch.drafters.skip.spec import Skip
from skipsearch.tuning.candidates import Candidate
from skipsearch.tuning.objective import ReplayObjective


class JointObjective:
    """An objective that judges a mask with several readings and returns the best trial.

    Only a few combinations of number format, experts and vocabulary lead, so all of them are tried
    instead of being modelled as categorical dimensions. Every searcher therefore searches masks,
    bits and vocabulary together, closed forms included. The recipe of a trial names the reading.

    Prompt by prompt, a reading is compared with the best trial so far, whichever reading that had.
    A reading that is clearly slower is dropped after a few prompts (`ReplayObjective`), so a
    further reading takes a fraction of the time of the first.
    """

    fidelity = "replay"

    def __init__(self, objectives: Sequence[ReplayObjective]):
        """objectives: one for each reading, the leading one first."""
        self.leading = objectives[0]
        self.by_reading = {objective.reading: objective for objective in objectives}
        for objective in objectives[1:]:
            objective.share_leader(self.leading)

    @property
    def readings(self) -> list[Reading]:
        """The readings that masks are judged with, the leading one first."""
        return list(self.by_reading)

    def judge(self, mask: SkipMask) -> Trial:
        """Return the trial of a mask with the reading that suits it best."""
        trials = (objective.judge(mask) for objective in self.by_reading.values())
        return min(trials, key=lambda trial: trial.seconds_per_token)

    def best_recipe(self, mask: SkipMask) -> Candidate:
        """Return the best recipe with this mask among the settings of the mask search."""
        candidates = (objective.best_recipe(mask) for objective in self.by_reading.values())
        return min(candidates, key=lambda candidate: candidate.seconds_per_token)

    def objective_of(self, recipe: Recipe | None) -> ReplayObjective:
        """Return the objective for the reading of a recipe's skip drafter.

        The leading one, if the recipe has no skip drafter or another reading.
        """
        skips = [] if recipe is None else [d for d in recipe.drafters if isinstance(d, Skip)]
        return self.by_reading.get(skips[-1].reading, self.leading) if skips else self.leading
