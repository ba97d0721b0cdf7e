"""The types of the fields of recipes and profiles: text, hashes, counts, and a mean with its
interval.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError


def broken_rule(key: str, reason: str) -> PydanticCustomError:
    """Return the error for a rule between fields that does not hold.

    key: path of the value to change, from the object that checks the rule.
    """
    return PydanticCustomError("rule", "{reason}", {"reason": reason, "key": key})


def _check_printable_line(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("it must be one line of printable text without spaces around it")
    return text


def _sort_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    repeated = [layer for layer in sorted(set(layers)) if layers.count(layer) > 1]
    if repeated:
        raise ValueError(f"layer {repeated[0]} is listed more than once")
    return tuple(sorted(layers))


Text = Annotated[
    str, StringConstraints(min_length=1, max_length=300), AfterValidator(_check_printable_line)
]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


def to_name(text: str) -> str:
    """Return a `Name` like a text, which is also a valid and visible file name on every system."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("-._").rstrip("-.")
    return name[:100] or "unknown"


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
GitCommit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,64}(-dirty)?$")]
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:[0-9]{2})"
Date = Annotated[str, StringConstraints(pattern=f"^{_DATE}(T{_TIME})?$")]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Layer = Annotated[int, Field(ge=0, le=1023)]
Layers = Annotated[tuple[Layer, ...], Field(strict=False)]  # not strict: YAML knows lists only
SkippedLayers = Annotated[Layers, AfterValidator(_sort_layers)]  # ascending, none twice
# The limits of sampling settings, the same in tasks, profiles and requests.
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 10**7
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0, le=MAX_TOP_K)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Positive = Annotated[int, Field(ge=1, le=10**12)]


def is_none(value: object) -> bool:
    """Return whether a value is None: a file then omits its key. The value 0 is written."""
    return value is None


def is_falsy(value: object) -> bool:
    """Return whether a value is false, 0 or empty: without effect, so a file omits its key."""
    return not value


class FrozenModel(BaseModel):
    """The base of all stored values: frozen, strict, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# A path below the profile's folder or the one above it. It cannot leave them, and no part of it is
# hidden.
_PATH_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
ModuleFile = Annotated[
    str,
    StringConstraints(
        pattern=rf"^({_PATH_PART}/){{0,3}}[A-Za-z0-9][A-Za-z0-9._-]{{0,80}}\.safetensors$"
    ),
]


class ModuleRef(FrozenModel):
    """A reference to a module file (trained weights of a drafter).

    The SHA-256 identifies the file if several folders have one of that name.
    """

    file: ModuleFile = Field(
        description="a .safetensors file, by its path from the profile's folder or from the one "
        "above it"
    )
    sha256: Sha256 = Field(description="of the file")
    parameters: Positive = Field(
        description="trained values, which take their room beside the model's own"
    )


class DraftModelRef(FrozenModel):
    """A reference to a model that drafts for another one.

    The SHA-256 identifies it. A list on each machine says where local models lie.
    """

    id: Text = Field(
        description="`demo`, a Hub id with its revision, or the name of a local file or folder"
    )
    weights_sha256: Sha256 = Field(description="hash of the weights")
    n_layers: int = Field(ge=1, le=1024, description="decoder layers, 1..1024")
    weight_bytes: Positive = Field(description="memory that the weights take")
    dtype: Dtype = Field(description="type the weights ran in")
    quantization: Text | None = Field(
        default=None, exclude_if=is_none, description="quantisation method; left out if none"
    )


class Interval(FrozenModel):
    """A positive mean and its 95 % interval."""

    mean: float = Field(gt=0, le=1e9)
    ci95: Annotated[tuple[float, float], Field(strict=False)] = Field(
        description="lower and upper bound, in the mean's unit, 0..1e9"
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Interval:
        low, high = self.ci95
        if not 0 <= low <= self.mean <= high <= 1e9:
            raise broken_rule(
                "ci95",
                f"the bounds must satisfy 0 <= low <= mean <= high, with a mean of {self.mean}",
            )
        return self

    def format_with_unit(self, unit: str = "") -> str:
        """Return `1.337× (1.310–1.366)`.

        All three numbers get as many decimals as the most precise of them has.
        """
        mean, low, high = (f"{value:g}" for value in (self.mean, *self.ci95))
        if "e" in mean + low + high:
            return f"{mean}{unit} ({low}–{high})"
        places = max(len(text.partition(".")[2]) for text in (mean, low, high))
        return f"{self.mean:.{places}f}{unit} ({self.ci95[0]:.{places}f}–{self.ci95[1]:.{places}f})"

    @classmethod
    def from_rounded(cls, mean: float, low: float, high: float) -> Interval:
        """Make an interval that is rounded to the precision that it supports.

        That is two significant digits of its half-width, or six of the mean if those are finer. The
        bounds are rounded outwards, so rounding never makes a claim stronger. If a skewed bootstrap
        leaves the mean outside of them, they are extended to it.

        Raises: ValueError if the three are not finite or the mean is not positive.
        """
        half_width = min(max(abs(high - low) / 2, abs(mean) * 1e-5), abs(mean))
        places = 1 - math.floor(math.log10(half_width)) if half_width > 0 else 6
        centre, unit = round(mean, places), 10.0**-places
        below = round(math.floor(min(low, mean) / unit + 1e-9) * unit, places)
        above = round(math.ceil(max(high, mean) / unit - 1e-9) * unit, places)
        return cls(mean=centre, ci95=(max(0.0, min(below, centre)), max(above, centre)))


def round_significant(value: float, digits: int = 3) -> float:
    """Round a value to `digits` significant digits; 0 stays 0."""
    return round(value, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0.0
