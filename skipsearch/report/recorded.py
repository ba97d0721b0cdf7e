"""What a study's attributes hold, as a report reads them: checked, since a study may come from another version or another hand."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from skipsearch.errors import DecodeError
from skipsearch.mask import sublayers
from skipsearch.recipe import Recipe

MAX_LAYERS = 1024          # as in a profile

Ratio = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
Round = Annotated[int, Field(ge=0, le=10**6)]
Bit = Annotated[int, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]


class Part(BaseModel):
    """Keys that a later version adds are none of our business."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Interval(Part):
    mean: Ratio
    low: Number
    high: Number


def _recipe(data: Any) -> Recipe | None:
    try:
        return None if data is None else Recipe.from_data(data)
    except (DecodeError, TypeError) as error:
        raise ValueError(f"the recipe is none that this version knows ({error})") from None


StoredRecipe = Annotated[Recipe | None, PlainValidator(_recipe)]


class BroughtGroup(Part):
    """Positions of the calibration text that are alike in what a drafter of the winner knows there, and how many tokens it got right."""

    drafter: Annotated[int, Field(ge=0, le=63)]
    by: Literal["match length", "confidence"]
    low: Number
    high: Number
    positions: Annotated[int, Field(ge=1, le=10**12)]
    right: Annotated[int, Field(ge=0, le=10**12)]


class MovedMasks(Part):
    """How the winner's masks moved over one generation. masks: (round from which it was in force, bits); rounds: (drafter, drafted,
    accepted), drafter -1 where nobody drafted."""

    drafter: Annotated[int, Field(ge=0, le=63)]
    masks: Annotated[tuple[tuple[Round, tuple[Bit, ...]], ...], Field(min_length=1, max_length=100_000)]
    rounds: Annotated[tuple[tuple[Annotated[int, Field(ge=-1, le=63)], Round, Round], ...], Field(min_length=1, max_length=100_000)]

    @model_validator(mode="after")
    def _in_order(self) -> MovedMasks:
        starts = [at for at, _ in self.masks]
        if starts != sorted(set(starts)) or starts[0] != 0 or starts[-1] >= len(self.rounds):
            raise ValueError("its masks do not follow one another from round 0 within its rounds")
        if len({len(bits) for _, bits in self.masks}) != 1:
            raise ValueError("its masks are of models of different depth")
        return self


class RacedRecipe(Part):
    """One contender under real decoding; predicted: what the search had promised, null where it promised nothing.

    recipe: null in older studies, which had one mask (attn, mlp) and a policy in words.
    """

    recipe: StoredRecipe = None
    attn: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    policy: str = ""
    predicted: Ratio | None = None
    speedup: Interval
    split: Literal["calibration", "holdout"]

    @model_validator(mode="after")
    def _drafts(self) -> RacedRecipe:
        if self.recipe is None and not (self.attn or self.mlp):
            raise ValueError("it has neither a recipe nor a mask")
        return self

    @property
    def drafts(self) -> object:
        """Equal for contenders that differ in nothing but the prompts that they were timed on."""
        return (self.attn, self.mlp) if self.recipe is None else self.recipe

    def __str__(self) -> str:
        return in_words(self.recipe, len(self.attn) + len(self.mlp), self.policy)


def in_words(recipe: Recipe | None, skipped: int, policy: str) -> str:
    """A recipe or, of an older study, what would be one: `skip 3 sub-layers, confidence 0.6, up to 5`."""
    return str(recipe) if recipe is not None else ", ".join(filter(None, [f"skip {sublayers(skipped)}", policy]))


class SurfacePoint(Part):
    """What the winner's mask is predicted to gain under one draft policy; threshold: null where the policy has none."""

    kind: str
    draft_length: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    speedup: Ratio


class Surface(Part):
    policies: tuple[SurfacePoint, ...] = ()


class Facts(Part):
    """What a trial says about itself beside its time."""

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
