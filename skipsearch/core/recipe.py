"""`Recipe`: an ordered list of drafters, each with its settings.

A search returns a recipe, a profile stores it and a decoder runs it.
In every round the drafters are asked in order, and the first that proposes something drafts. An
empty recipe is plain decoding.

    Recipe((Lookup(min_match=2, draft_length=8), Skip(attn=(3, 4), mlp=(7,), draft_length=5)))

This recipe looks the next tokens up in the text so far. If that finds nothing, the model drafts
with three sub-layers skipped.

The settings of a drafter are a `DrafterSpec`, those of an exit policy an `ExitSpec`. They are
frozen values that YAML, the study and the decoder share. A drafter is a folder in `drafters/`, an
exit policy a file in `drafters/exits/`. Each has one line in a table below. Importing a spec does
not load torch, because reading a profile must not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import DraftWeights, Reading, Vocabulary, is_stored
from skipsearch.core.registry import resolve_name
from skipsearch.core.schema_types import DraftModelRef, Fraction, FrozenModel, ModuleRef, is_none
from skipsearch.errors import DecodeError, SkipSearchError

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter

# To add one: a folder in drafters/ with spec.py and session.py, and a line here.
DRAFTERS: dict[str, str] = {
    "lookup": "skipsearch.drafters.lookup.spec:Lookup",
    "skip": "skipsearch.drafters.skip.spec:Skip",
    "adapted": "skipsearch.drafters.adapted.spec:Adapted",
    "asd": "skipsearch.drafters.asd.spec:ASD",
    "clasp": "skipsearch.drafters.clasp.spec:CLaSp",
    "swift": "skipsearch.drafters.swift.spec:SWIFT",
    "kangaroo": "skipsearch.drafters.kangaroo.spec:Kangaroo",
    "s3d": "skipsearch.drafters.s3d.spec:S3D",
    "mtp": "skipsearch.drafters.mtp.spec:Mtp",
    "draft-model": "skipsearch.drafters.draft_model.spec:DraftModel",
}
# To add one: a file in drafters/exits/ and a line here.
EXITS: dict[str, str] = {
    "fixed": "skipsearch.drafters.exits.fixed:Fixed",
    "confidence": "skipsearch.drafters.exits.confidence:Confidence",
    "adaptive": "skipsearch.drafters.exits.adaptive:Adaptive",
}

DraftLength = Annotated[
    int, Field(ge=1, le=64, description="most tokens drafted in a round, 1..64")
]


DraftVocabulary = Annotated[
    Vocabulary | None,
    Field(
        exclude_if=is_none,
        description="tokens that the draft can propose, besides those of the request; left out: "
        "all",
    ),
]


class Siblings(FrozenModel):
    """A rule for siblings: tokens that are verified together with a draft token.

    They are the next most likely tokens of the draft at the same position. Each sibling adds a row
    to the verify pass. If the draft token is rejected and a sibling is
    accepted, the round yields one token more.
    """

    below: Fraction = Field(
        description="a token whose top probability is below this has siblings, 0..1"
    )
    most: Annotated[int, Field(ge=1, le=4)] = Field(description="siblings of one token, 1..4")

    def count_for(self, confidence: float) -> int:
        """Return the number of siblings of a token with this top probability."""
        return self.most if confidence < self.below else 0

    def __str__(self) -> str:
        siblings = f"{self.most} sibling{'s' if self.most > 1 else ''}"
        return f"always {siblings}" if self.below == 1 else f"{siblings} below {self.below:g}"


DraftSiblings = Annotated[
    Siblings | None,
    Field(exclude_if=is_none, description="verified beside unsure tokens; left out: none"),
]


@dataclass(frozen=True)
class DrafterInfo:
    """A description of a drafter for people who choose one.

    source: the publication that describes it.
    requires: the data or files that it needs before or during drafting.
    combines_with: the drafters that it may be combined with.
    """

    source: str = ""
    requires: str = "nothing"
    combines_with: str = "any drafter before or after it"


class DrafterSpec(FrozenModel):
    """One drafter of a recipe, as it is stored.

    A subclass adds its own fields, first of all `kind`, a Literal of its name in DRAFTERS. Fields
    `module`, `weights`, `vocabulary`, `exit` and `siblings` mean the same in every subclass.
    """

    info: ClassVar[DrafterInfo] = DrafterInfo()
    dynamic_mask: ClassVar[bool] = False  # whether its mask changes while it decodes

    kind: str
    draft_length: DraftLength

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        """Make the drafter for a model.

        module_folders: folders in which the files of `modules` are looked up, in this order.

        Raises: MaskError if it does not fit the model; ModuleError if a module is missing, damaged
            or made for another model.
        """
        raise NotImplementedError

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        """The modules (trained weights) that it needs."""
        module: ModuleRef | None = getattr(self, "module", None)
        return () if module is None else (module,)

    @property
    def draft_model(self) -> DraftModelRef | None:
        """The second model that it drafts with; None: the verifying model drafts, or none does."""
        return None

    def mask(self, n_layers: int) -> SkipMask | None:
        """Return the skip mask of its draft passes; None if it drafts without a pass of the model.

        Raises: MaskError.
        """
        return None

    @property
    def reading(self) -> Reading:
        """What its draft passes read of the model that drafts, besides what the mask skips."""
        return Reading(getattr(self, "weights", "stored"), getattr(self, "vocabulary", None))

    @property
    def scratch_slots(self) -> int:
        """The number of extra cache slots for siblings and for passes that choose a mask.

        These slots come after the last slot that a token of the text may get.
        """
        siblings: Siblings | None = getattr(self, "siblings", None)
        return 0 if siblings is None else self.draft_length * siblings.most

    def format_reading(self) -> str:
        """Return `, int8, 4,213 tokens of the vocabulary`; "" if a draft reads all of the model."""
        return "" if self.reading.is_everything else f", {self.reading}"

    def format_limits(self) -> str:
        """Return `confidence 0.6, up to 5, 1 sibling below 0.9`, or what of it there is."""
        exit_policy, siblings = getattr(self, "exit", None), getattr(self, "siblings", None)
        parts = exit_policy, f"up to {self.draft_length}", siblings
        return ", ".join(str(part) for part in parts if part is not None)

    def __str__(self) -> str:
        """Return `mtp, confidence 0.6, up to 5`."""
        return f"{self.kind}{self.format_reading()}, {self.format_limits()}"


class ReadingSpec(DrafterSpec):
    """A drafter whose passes run layers of the model, and may read less of them."""

    weights: DraftWeights = Field(
        default="stored",
        exclude_if=is_stored,
        description="number format of the draft's layers; left out: stored, as the model has them",
    )
    vocabulary: DraftVocabulary = None


@dataclass(frozen=True)
class Recipe:
    """An ordered list of drafters.

    drafters: asked in this order in every round; () is plain decoding.
    """

    drafters: tuple[DrafterSpec, ...] = ()

    @classmethod
    def from_data(cls, data: Any) -> Recipe:
        """Make a recipe from the result of `as_data`. Raises: DecodeError."""
        return cls(tuple(_validate(_drafter_adapter(), entry) for entry in data))

    def as_data(self) -> list[dict[str, Any]]:
        """Return the recipe as plain data, for JSON and YAML."""
        return [drafter.model_dump(mode="json") for drafter in self.drafters]

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        """The modules that its drafters need."""
        return tuple(dict.fromkeys(ref for drafter in self.drafters for ref in drafter.modules))

    @property
    def draft_models(self) -> tuple[DraftModelRef, ...]:
        """The second models that its drafters need."""
        refs = (drafter.draft_model for drafter in self.drafters)
        return tuple(dict.fromkeys(ref for ref in refs if ref is not None))

    def mask(self, n_layers: int) -> SkipMask | None:
        """Return the first mask among its drafters, the one that a search varies.

        None if no drafter has a mask.
        """
        return next(
            (mask for drafter in self.drafters if (mask := drafter.mask(n_layers)) is not None),
            None,
        )

    @property
    def shape(self) -> str:
        """The kinds of its drafters in order, such as `lookup,skip`; `plain` if none."""
        return ",".join(drafter.kind for drafter in self.drafters) or "plain"

    def __str__(self) -> str:
        """Return `lookup: 2 tokens must match, copies up to 8; skip 3 sub-layers, confidence 0.6,
        up to 5`.
        """
        return "; ".join(map(str, self.drafters)) or "plain"


class ExitSpec(FrozenModel):
    """An exit policy, as it is stored: when a draft ends before its draft length.

    `drafters/exits/exit_base.py` has the interface that a kind implements.
    """

    kind: str
    reads_confidence: ClassVar[bool] = True


def make_spec_union(table: Mapping[str, str]) -> Any:
    """Return the type of any spec of a table: a union on `kind`, for pydantic."""
    kinds = tuple(resolve_name("kind", name, table, SkipSearchError) for name in table)
    return Annotated[reduce(or_, kinds), Field(discriminator="kind")]


def make_exit(kind: str, **settings: Any) -> Any:
    """Return an exit policy by its name.

    Raises: DecodeError for an unknown kind or an invalid setting.
    """
    return _validate(
        TypeAdapter(resolve_name("exit policy", kind, EXITS, DecodeError)),
        {"kind": kind, **settings},
    )


@cache
def _drafter_adapter() -> TypeAdapter[Any]:
    return TypeAdapter(make_spec_union(DRAFTERS))


def _validate(adapter: TypeAdapter[Any], data: Any) -> Any:
    """Validate data. Raises: DecodeError that names the wrong field."""
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "it"
        raise DecodeError(f"{name} is {first['input']!r:.80}: {first['msg']}") from None
