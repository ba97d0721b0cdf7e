"""Schemas of a study's attributes, for reports.

Attributes are validated, because the study may be from another version or another person.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from skipsearch.core.recipe import Recipe
from skipsearch.errors import DecodeError

MAX_LAYERS = 1024  # as in a profile

Ratio = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


SampleText = Annotated[str, Field(max_length=10_000)]


class StoredModel(BaseModel):
    """A base class that ignores unknown keys, which later versions may add."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StoredInterval(StoredModel):
    mean: Ratio
    low: Number
    high: Number


def _parse_recipe(data: Any) -> Recipe:
    try:
        return Recipe.from_data(data)
    except (DecodeError, TypeError) as error:
        raise ValueError(f"the recipe is not one that this version knows ({error})") from None


StoredRecipe = Annotated[Recipe, PlainValidator(_parse_recipe)]


class StoredReliabilityBin(StoredModel):
    """A bin that counts positions of the calibration text, and those where a drafter was right."""

    drafter: Annotated[int, Field(ge=0, le=63)]  # index in the winner's recipe
    by: Literal["match length", "confidence"]
    low: Number  # lower edge, inclusive
    high: Number
    positions: Annotated[int, Field(ge=1, le=10**12)]
    right: Annotated[int, Field(ge=0, le=10**12)]  # positions where the next token was right


class RaceRecord(StoredModel):
    """A candidate with its measurement in the race, or on hold-out prompts."""

    recipe: StoredRecipe
    predicted: Ratio | None = None  # predicted speedup; None: not predicted
    speedup: StoredInterval
    split: Literal["calibration", "holdout"]


class StoredSample(StoredModel):
    """An answer, as parts of text that drafters and the full model wrote."""

    prompt: Annotated[str, Field(max_length=1000)]  # name of the prompt
    kinds: Annotated[list[str], Field(max_length=64)]  # of the drafters
    # Of each round: index of the drafter, text of its accepted tokens, the full model's own text.
    rounds: Annotated[
        list[tuple[Annotated[int, Field(ge=0)] | None, SampleText, SampleText]],
        Field(max_length=10_000),
    ]

    @model_validator(mode="after")
    def _check_kinds(self) -> StoredSample:
        if any(drafter is not None and drafter >= len(self.kinds) for drafter, *_ in self.rounds):
            raise ValueError("a round names a drafter that is not listed")
        return self


class StoredReading(StoredModel):
    """What is predicted of drafts that read something else, with nothing skipped."""

    weights: str  # number format
    tokens: Annotated[int, Field(ge=1, le=10**7)] | None = None  # of the vocabulary; None: all
    alpha: Annotated[float, Field(ge=0, le=1)]
    beta: Number
    speedup: Ratio
    draft_bytes: Annotated[int, Field(ge=0, le=10**15)]  # memory besides the model's

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f", {self.tokens:,} tokens"
        return f"{self.weights}{tokens}"


class StoredTrialAttrs(StoredModel):
    """The attributes of a trial, besides its time."""

    stderr: Number = 0.0
    fidelity: str = ""
    alpha: Number | None = None
    tau: Number | None = None
    beta: Number | None = None
    baseline_seconds_per_token: Ratio | None = None
    recipe: StoredRecipe
    searcher: str
    search_seconds: Number
