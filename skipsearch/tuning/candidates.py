"""Candidates: recipes with what is predicted and what is measured of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DrafterCost
from skipsearch.decoding import Decoder
from skipsearch.models.adapter import ModelAdapter
from skipsearch.replay.simulate import Prediction, compute_drafter_costs
from skipsearch.timing.interleaved import PairedTimings
from skipsearch.tuning.events import CandidateMeasured


@dataclass(frozen=True)
class Candidate:
    """A recipe with the prediction from replay and the measurement from real decoding."""

    recipe: Recipe
    predicted_speedup: float | None = None  # None: replay cannot predict this recipe
    drafter_costs: tuple[DrafterCost | None, ...] = ()  # for the guard, one for each drafter
    module_folders: tuple[Path, ...] = ()  # with its modules
    # prompt by prompt, by replay; None: replay cannot predict this recipe
    prediction: Prediction | None = field(default=None, compare=False, repr=False)
    # against plain decoding; None: not measured yet
    measurement: PairedTimings | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_prediction(
        cls, recipe: Recipe, prediction: Prediction, plain_pass_s: float
    ) -> Candidate:
        """Return the candidate of a predicted recipe. plain_pass_s: seconds of a plain pass."""
        return cls(
            recipe,
            plain_pass_s / prediction.seconds_per_token,
            tuple(compute_drafter_costs(prediction.stats, plain_pass_s)),
            prediction=prediction,
        )

    @property
    def seconds_per_token(self) -> float:
        """The predicted seconds per token."""
        assert self.prediction is not None
        return self.prediction.seconds_per_token

    def make_decoder(self, model: ModelAdapter) -> Decoder:
        return Decoder(
            model, self.recipe, drafter_costs=self.drafter_costs, module_folders=self.module_folders
        )

    def describe_measurement(self, split: str) -> CandidateMeasured:
        """Return the event that reports the measurement. split: "calibration" or "holdout"."""
        assert self.measurement is not None
        return CandidateMeasured(
            self.recipe,
            # A prediction is for calibration prompts.
            self.predicted_speedup if split == "calibration" else None,
            self.measurement.speedup,
            split,
            self.measurement.drafted.n_prompts,
            self.measurement.stopped_early,
        )
