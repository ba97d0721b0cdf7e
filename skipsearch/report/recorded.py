"""The attributes of a study as a report reads them.

They are validated, because a study may come from another version or from somebody else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from skipsearch.core.mask import format_sublayer_count
from skipsearch.core.recipe import Recipe
from skipsearch.errors import DecodeError

MAX_LAYERS = 1024  # as in a profile

Ratio = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


class StoredModel(BaseModel):
    """A base class that ignores keys which a later version added."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StoredInterval(StoredModel):
    mean: Ratio
    low: Number
    high: Number


def _parse_recipe(data: Any) -> Recipe | None:
    try:
        return None if data is None else Recipe.from_data(data)
    except (DecodeError, TypeError) as error:
        raise ValueError(f"the recipe is not one that this version knows ({error})") from None


StoredRecipe = Annotated[Recipe | None, PlainValidator(_parse_recipe)]


class StoredReliabilityBin(StoredModel):
    """How often a drafter was right at positions of the calibration text in one range."""

    drafter: Annotated[int, Field(ge=0, le=63)]  # index in the winner's recipe
    by: Literal["match length", "confidence"]
    low: Number  # of the range, inclusive
    high: Number
    positions: Annotated[int, Field(ge=1, le=10**12)]
    right: Annotated[int, Field(ge=0, le=10**12)]  # positions where the next token was right


class RaceRecord(StoredModel):
    """A candidate that decoded prompts in the race."""

    recipe: StoredRecipe = None  # None in older studies, which have the next three keys
    attn: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    policy: str = ""  # in words
    predicted: Ratio | None = None  # predicted speedup; None: not predicted
    speedup: StoredInterval
    split: Literal["calibration", "holdout"]

    @model_validator(mode="after")
    def _check_draft(self) -> RaceRecord:
        if self.recipe is None and not (self.attn or self.mlp):
            raise ValueError("it has neither a recipe nor a mask")
        return self

    @property
    def draft_key(self) -> object:
        """A key that is equal for records of the same draft on different prompts."""
        return (self.attn, self.mlp) if self.recipe is None else self.recipe

    def __str__(self) -> str:
        return describe_recipe(self.recipe, len(self.attn) + len(self.mlp), self.policy)


def describe_recipe(recipe: Recipe | None, n_skipped: int, policy: str) -> str:
    """Return a recipe in words.

    In an older study it has none: `skip 3 sub-layers, confidence 0.6, up to 5`.
    """
    if recipe is not None:
        return str(recipe)
    return ", ".join(filter(None, [f"skip {format_sublayer_count(n_skipped)}", policy]))


class SurfacePoint(StoredModel):
    """The predicted speedup of the winner's mask under one draft policy."""

    kind: str  # of the exit policy
    draft_length: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None  # None: the policy has none
    speedup: Ratio


class Surface(StoredModel):
    policies: tuple[SurfacePoint, ...] = ()


class StoredTrialAttrs(StoredModel):
    """The attributes of a trial, besides its time."""

    stderr: Number = 0.0
    fidelity: str = ""
    alpha: Number | None = None
    tau: Number | None = None
    beta: Number | None = None
    baseline_seconds_per_token: Ratio | None = None
    recipe: StoredRecipe = None
    policy: str = ""
    searcher: str = ""
    search_seconds: Number | None = None
