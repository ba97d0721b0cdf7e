"""Events that a search or a training reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import Estimate, Trial


@dataclass(frozen=True)
class StageStarted:
    """A new part of the work begins."""

    title: str


@dataclass(frozen=True)
class StageProgress:
    """Progress of the current stage."""

    done: float  # in the unit of `total`
    total: float
    judged: Trial | None = None  # the latest trial, during the search
    best: Trial | None = None  # the best trial so far, during the search


@dataclass(frozen=True)
class CandidateMeasured:
    """A candidate was timed in real decoding."""

    recipe: Recipe
    predicted_speedup: float | None  # None: replay cannot predict it
    speedup: Estimate
    split: str  # "calibration" or "holdout"
    n_prompts: int  # prompts of that split over which it was timed
    stopped_early: bool = False  # because the interval of the speedup was narrow

    def as_dict(self) -> dict[str, Any]:
        """Return the event as an entry of the study's attribute `raced`."""
        return {
            "recipe": self.recipe.as_data(),
            "predicted": self.predicted_speedup,
            "speedup": asdict(self.speedup),
            "split": self.split,
        }


@dataclass(frozen=True)
class BaselinePredicted:
    """The predicted speedup of lookup alone. A mask helps only if its speedup is higher."""

    speedup: float


@dataclass(frozen=True)
class Notice:
    """A message to the user that reports no progress."""

    sentence: str
    casts_doubt: bool = False  # whether it puts the measurements of this search in doubt


@dataclass(frozen=True)
class Forecast:
    """The predicted duration of `tune` as a whole, reported when the preparation is done."""

    prepared_s: float  # spent on the preparation
    search_s: float | None  # for judging masks; None: only their number is limited
    refine_s: float  # for trying the best masks with every setting
    decode_s: float  # for the race and the final measurement


@dataclass(frozen=True)
class LongestDecoding:
    """How long race and final measurement may take, reported before the preparation."""

    token_s: float  # of plain decoding
    prefill_s: float  # of a prompt of median length
    n_prompt: int  # tokens of that prompt
    n_texts: int  # that are decoded, one at a time
    n_tokens: int  # of a text, at most

    @property
    def total_s(self) -> float:
        return self.n_texts * (self.prefill_s + self.n_tokens * self.token_s)


TuneEvent = (
    StageStarted
    | StageProgress
    | BaselinePredicted
    | CandidateMeasured
    | Notice
    | LongestDecoding
    | Forecast
)
TuneListener = Callable[[TuneEvent], None]
ProgressCallback = Callable[[int, int], None]  # (done, total)


def ignore_event(event: TuneEvent) -> None:
    """Ignore an event."""


def make_progress_callback(on_event: TuneListener) -> ProgressCallback:
    """Return a callback that reports (done, total) as a `StageProgress`."""
    return lambda done, total: on_event(StageProgress(done, total))
