"""`Recipe`: what a search looks for, a profile stores and a decoder runs: an ordered list of
drafters, each with its settings.

In every round the drafters are asked in order, and the first that proposes something drafts. An
empty recipe is plain decoding.

    Recipe((Lookup(min_match=2, draft_length=8), Skip(attn=(3, 4), mlp=(7,), draft_length=5)))

looks the next tokens up in the text so far; where it finds nothing, the model drafts with three
sub-layers left out.

A drafter's settings are a `DrafterSpec`, an exit policy's an `ExitSpec`: frozen values that YAML,
the study and the decoder share. Each kind is one file, with one line in the table below. These
files load no torch, because reading a profile must not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

from skipsearch.core.mask import SkipMask
from skipsearch.core.registry import resolve_name
from skipsearch.core.schema_types import Fraction, FrozenModel, ModuleRef
from skipsearch.errors import DecodeError, SkipSearchError

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter

# To add one: a file in drafters/ and a line here.
DRAFTERS: dict[str, str] = {
    "lookup": "skipsearch.drafters.lookup.spec:Lookup",
    "skip": "skipsearch.drafters.skip.spec:Skip",
    "adapted": "skipsearch.drafters.adapted.spec:Adapted",
    "asd": "skipsearch.drafters.asd.spec:ASD",
    "clasp": "skipsearch.drafters.clasp.spec:CLaSp",
    "swift": "skipsearch.drafters.swift.spec:SWIFT",
    "kangaroo": "skipsearch.drafters.kangaroo.spec:Kangaroo",
    "s3d": "skipsearch.drafters.s3d.spec:S3D",
}
# To add one: a file in exits/ and a line here.
EXITS: dict[str, str] = {
    "fixed": "skipsearch.drafters.exits.fixed:Fixed",
    "confidence": "skipsearch.drafters.exits.confidence:Confidence",
    "adaptive": "skipsearch.drafters.exits.adaptive:Adaptive",
}

DraftLength = Annotated[
    int, Field(ge=1, le=64, description="most tokens drafted in a round, 1..64")
]


class Siblings(FrozenModel):
    """Alternatives that are verified beside a drafted token of which the draft is unsure: what it
    would have drafted instead.

    The verify pass has a row more for each. Where the draft's own choice is wrong and a sibling
    right, the round yields one token more."""

    below: Fraction = Field(
        description="a token whose top probability is below this has siblings, 0..1"
    )
    most: Annotated[int, Field(ge=1, le=4)] = Field(description="siblings of one token, 1..4")

    def count_for(self, confidence: float) -> int:
        """Siblings of a token with this top probability."""
        return self.most if confidence < self.below else 0

    def __str__(self) -> str:
        return f"{self.most} sibling{'s' if self.most > 1 else ''} below {self.below:g}"


@dataclass(frozen=True)
class DrafterInfo:
    """What people want to know of a drafter before they try it. source: who described it; requires:
    what it takes before and while it drafts; combines_with: what it may be combined with."""

    source: str = ""
    requires: str = "nothing"
    combines_with: str = "any drafter before it or behind it"


class DrafterSpec(FrozenModel):
    """One drafter of a recipe, as it is stored. A subclass adds its own fields, first of all
    `kind`, a Literal of its name in DRAFTERS.
    """

    info: ClassVar[DrafterInfo] = DrafterInfo()
    dynamic_mask: ClassVar[bool] = False  # whether its mask changes while it decodes

    kind: str
    draft_length: DraftLength

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        """The drafter itself, for this model. module_folders: where the files of `modules` are
        looked for, in this order.

        Raises: MaskError if it does not fit that model; ModuleError for a trained part that is not
        there, is damaged or fits another model."""
        raise NotImplementedError

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        """The trained parts that it names."""
        return ()

    def mask(self, n_layers: int) -> SkipMask | None:
        """What its draft passes leave out; None if it drafts without a pass of the model. Raises:
        MaskError.
        """
        return None

    @property
    def scratch_slots(self) -> int:
        """Slots of the cache that it takes behind the last token that may come, at most, while a
        round lasts.
        """
        return 0

    def __str__(self) -> str:
        """`lookup, up to 8`"""
        return f"{self.kind}, up to {self.draft_length}"


@dataclass(frozen=True)
class Recipe:
    """drafters: asked in this order in every round. () is plain decoding."""

    drafters: tuple[DrafterSpec, ...] = ()

    @classmethod
    def from_data(cls, data: Any) -> Recipe:
        """From what `as_data` gave. Raises: DecodeError."""
        return cls(tuple(_validate(_drafter_adapter(), entry) for entry in data))

    def as_data(self) -> list[dict[str, Any]]:
        """Plain data, for JSON and YAML."""
        return [drafter.model_dump(mode="json") for drafter in self.drafters]

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        """The trained parts that its drafters name."""
        return tuple(dict.fromkeys(ref for drafter in self.drafters for ref in drafter.modules))

    def mask(self, n_layers: int) -> SkipMask | None:
        """The first mask among its drafters, which is what a search of masks varies; None if no
        drafter has one.
        """
        return next(
            (mask for drafter in self.drafters if (mask := drafter.mask(n_layers)) is not None),
            None,
        )

    @property
    def shape(self) -> str:
        """Which drafters, in order: `lookup,skip`; `plain` if none."""
        return ",".join(drafter.kind for drafter in self.drafters) or "plain"

    def __str__(self) -> str:
        """`lookup: 2 tokens must match, copies up to 8; skip 3 sub-layers, confidence 0.6, up to
        5`
        """
        return "; ".join(map(str, self.drafters)) or "plain"


class ExitSpec(FrozenModel):
    """When a round of drafting ends before its draft length, as it is stored.
    `drafters/exits/exit_base.py` has the port that a kind implements.
    """

    kind: str
    reads_confidence: ClassVar[bool] = True


def make_spec_union(table: Mapping[str, str]) -> Any:
    """The type of anything in a table of specs: a union on `kind`, for pydantic."""
    kinds = tuple(resolve_name("kind", name, table, SkipSearchError) for name in table)
    return Annotated[reduce(or_, kinds), Field(discriminator="kind")]


def make_exit(kind: str, **settings: Any) -> Any:
    """An exit policy from its name. Raises: DecodeError for an unknown kind or a senseless
    setting.
    """
    return _validate(
        TypeAdapter(resolve_name("exit policy", kind, EXITS, DecodeError)),
        {"kind": kind, **settings},
    )


@cache
def _drafter_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(make_spec_union(DRAFTERS))


def _validate(adapter: TypeAdapter[Any], data: Any) -> Any:
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "it"
        raise DecodeError(f"{name} is {first['input']!r:.80}: {first['msg']}") from None
