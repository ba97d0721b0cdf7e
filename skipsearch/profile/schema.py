"""The profile, version 3: a recipe for a model, task and device, and its measurements.

Every model here is frozen, rejects unknown keys and coerces nothing (`true` is not 1, `"3"` is not
3). Keys have the order in which they are written. A key that may be `null` is still written, unless
its description says that it is left out.

The other keys depend on `verdict`:

    speculate   the recipe in `drafters` was measured on held-out prompts, and decoding should use
                it.
    plain       nothing beat autoregressive decoding, so decoding runs plain: `drafters` is empty.
                `lost` and `measured` document the best candidate that lost. If none was worth
                measuring, `lost` is empty too, and what only drafting has (`alpha`,
                `accepted_fraction`, `beta`, `verify_ratio`) is null.
    unmeasured  imported from elsewhere: `engine`, `hardware`, `measured` and `software` are null,
                and so is whatever its source does not say.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator
from pydantic.json_schema import GenerateJsonSchema

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DRAFTERS, DrafterSpec, Recipe, make_spec_union
from skipsearch.core.schema_types import (
    Count,
    Date,
    Dtype,
    FrozenModel,
    GitCommit,
    Name,
    Sha256,
    Temperature,
    Text,
    TopK,
    TopP,
    broken_rule,
    is_falsy,
)
from skipsearch.core.stats import DrafterCost
from skipsearch.errors import MaskError
from skipsearch.profile.measurement import (
    BatchSpeed,
    ContextTokens,
    DrafterCounts,
    FinishReasons,
    Lossless,
    Measurement,
    StreamMeasurement,
    StreamPart,
)

__all__ = [
    "BatchSpeed",
    "ContextTokens",
    "DrafterCounts",
    "FinishReasons",
    "Lossless",
    "Measurement",
    "Profile",
    "StreamMeasurement",
    "StreamPart",
    "json_schema",
]

SCHEMA_VERSION = 3
# Bits of a model's weights, if drafts in fewer bits were not measured.
UNMEASURED_BITS = 16
# Verify pass over plain pass, if it was not measured. Typical of CPUs and GPUs at batch size one.
UNMEASURED_VERIFY_RATIO = 1.2


class ModelInfo(FrozenModel):
    id: Text = Field(description="`demo`, a Hub id, or the name of a local folder")
    revision: Text | None = Field(description="Hub revision; null where there is none")
    family: Name = Field(description="architecture, by its row in the table of families")
    n_layers: int = Field(ge=1, le=1024, description="decoder layers, 1..1024")
    config_sha256: Sha256 | None = Field(
        description="hash of the model's configuration; null only if unmeasured"
    )
    weights_sha256: Sha256 | None = Field(
        description="hash of the model's weights; null only if unmeasured"
    )
    dtype: Dtype | None = Field(description="type the weights ran in; null only if unmeasured")
    quantization: Text | None = Field(description="quantisation method; null if none")


class ProfileSampling(FrozenModel):
    temperature: Temperature = Field(description="0..100, no unit; 0 is greedy")
    top_p: TopP = Field(description="probability mass kept, 0 < top_p <= 1; 1 keeps all")
    top_k: TopK = Field(description="tokens kept, 0..10,000,000; 0 keeps all")


class TaskInfo(FrozenModel):
    name: Name = Field(description="task; `any` is used wherever a task has no profile of its own")
    version: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        description="version of the task's manifest, from 1; null only if unmeasured"
    )
    calibration_sha256: Sha256 | None = Field(
        description="hash of the calibration text; null only if unmeasured"
    )
    chat_template_sha256: Sha256 | None = Field(
        default=None,
        exclude_if=is_falsy,
        description="hash of the chat template that prompts were put into; left out if they went "
        "in as they are",
    )
    sampling: ProfileSampling

    @property
    def is_chat(self) -> bool:
        """Whether prompts were put into a chat template."""
        return self.chat_template_sha256 is not None


class Hardware(FrozenModel):
    kind: Literal["cpu", "cuda", "mps"]
    name: Text = Field(description="the device's own name")
    count: int = Field(ge=1, le=4096, description="devices used, 1..4096")
    threads: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        description="CPU threads used, 1..4096; null where they do not matter"
    )


if TYPE_CHECKING:
    AnyDrafter = DrafterSpec
else:
    AnyDrafter = make_spec_union(DRAFTERS)
MAX_DRAFTERS = 8
Drafters = Annotated[tuple[AnyDrafter, ...], Field(strict=False, max_length=MAX_DRAFTERS)]


class Software(FrozenModel):
    skipsearch: Text
    torch: Text
    transformers: Text
    cuda: Text | None


class Provenance(FrozenModel):
    searcher: Name = Field(
        description="searcher that proposed the mask; `import` for one from elsewhere"
    )
    objective: Literal["replay", "wall"] | None = Field(
        description="what the search minimised; null only if unmeasured"
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        description="seed of the search, 0..2**63-1; null only if unmeasured"
    )
    trials: Count | None = Field(description="masks judged; null only if unmeasured")
    search_seconds: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        description="length of the search, seconds, 0..1e9; null only if unmeasured"
    )
    created: Date | None = Field(description="ISO 8601 date or time; null only if unmeasured")
    commit: GitCommit | None = Field(
        description="commit of the skipsearch that wrote it; null outside a checkout"
    )
    source: Text | None = Field(
        default=None,
        exclude_if=is_falsy,
        description="where an imported mask comes from; left out if null",
    )


_DRAFT_FIGURES = ("alpha", "accepted_fraction", "beta", "verify_ratio")
_NULL_ONLY_IF_UNMEASURED = (
    "engine",
    "hardware",
    "software",
    "measured",
    "model.dtype",
    "model.config_sha256",
    "model.weights_sha256",
    "task.version",
    "task.calibration_sha256",
    "provenance.objective",
    "provenance.seed",
    "provenance.trials",
    "provenance.search_seconds",
    "provenance.created",
)
_NULL_IF_UNMEASURED = ("engine", "hardware", "software", "measured")


class Profile(FrozenModel):
    """A recipe for one model, task and device, with its measurements."""

    schema_version: Literal[3]
    model: ModelInfo
    task: TaskInfo
    hardware: Hardware | None
    engine: Name | None = Field(description="engine that was measured; null only if unmeasured")
    verdict: Literal["speculate", "plain", "unmeasured"]
    drafters: Drafters = Field(
        description="asked in this order in every round, the first that proposes something drafts; "
        "at most 8, and "
        "empty exactly if the verdict is plain"
    )
    lost: Drafters = Field(
        description="of a plain verdict: the drafters of the best candidate that lost; else empty"
    )
    measured: Measurement | None
    software: Software | None
    provenance: Provenance

    _folder: Path | None = PrivateAttr(default=None)

    def located_in(self, folder: Path) -> Profile:
        """Return a copy of this profile whose modules are sought in `folder` and its parent."""
        moved = self.model_copy()
        moved._folder = folder
        return moved

    @property
    def module_folders(self) -> tuple[Path, ...]:
        """The folders of the profile's modules: its own folder, and the parent.

        All tasks of a model share the parent. Empty if the profile was not loaded from a file.
        """
        return () if self._folder is None else (self._folder, self._folder.parent)

    def __eq__(self, other: object) -> bool:
        # Profiles in different folders may be equal.
        return isinstance(other, Profile) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash((self.model, self.task, self.hardware, self.drafters))

    @property
    def recipe(self) -> Recipe:
        """The recipe that decoding runs."""
        return Recipe(self.drafters)

    @property
    def measured_recipe(self) -> Recipe:
        """The recipe that was measured: for a plain verdict, the best candidate that lost."""
        return Recipe(self.drafters or self.lost)

    @property
    def drafter_costs(self) -> tuple[DrafterCost | None, ...]:
        """The costs of each drafter of the measured recipe, for the guard.

        Without a measurement, β is the share of sub-layers that a draft runs, or the layers of a
        draft model over those of the full model, and v is
        UNMEASURED_VERIFY_RATIO.
        """
        measured, drafters = self.measured, self.measured_recipe.drafters
        if measured is None:
            return tuple(_unmeasured_cost(drafter, self.model.n_layers) for drafter in drafters)
        if measured.by_drafter:
            return tuple(counts.drafter_cost for counts in measured.by_drafter)
        return (None,) * len(drafters)

    @property
    def plain_from_batch(self) -> int | None:
        """The smallest batch size from which on plain decoding is faster; None: not known."""
        return None if self.measured is None else self.measured.plain_from_batch

    @property
    def mask(self) -> SkipMask:
        """The mask of the measured recipe's first drafter that has one; else an empty mask."""
        return self.measured_recipe.mask(self.model.n_layers) or SkipMask(self.model.n_layers)

    @model_validator(mode="after")
    def _check_recipe_fits_model(self) -> Profile:
        for key, drafters in (("drafters", self.drafters), ("lost", self.lost)):
            for i, drafter in enumerate(drafters):
                try:
                    mask = drafter.mask(self.model.n_layers)
                except MaskError as error:
                    raise broken_rule(f"{key}.{i}", str(error)) from error
                if mask is not None and not mask.n_skipped and drafter.reading.is_everything:
                    raise broken_rule(f"{key}.{i}", "it skips nothing, so it is no draft")
                if drafter in drafters[:i]:
                    raise broken_rule(
                        f"{key}.{i}",
                        f"it is the same as {key}[{drafters.index(drafter)}], which is asked "
                        "before it, so it "
                        "never drafts; remove it",
                    )
        if self.verdict == "plain" and self.drafters:
            raise broken_rule(
                "drafters",
                "the verdict is plain, so drafters must be []; or set verdict: speculate",
            )
        if self.verdict != "plain" and not self.drafters:
            raise broken_rule(
                "drafters",
                f"the verdict is {self.verdict}, so drafters must not be []; or set verdict: plain",
            )
        if self.lost and self.verdict != "plain":
            raise broken_rule("lost", "only a plain verdict has candidates that lost")
        return self

    @model_validator(mode="after")
    def _check_verdict(self) -> Profile:
        if self.verdict == "unmeasured":
            for key in _NULL_IF_UNMEASURED:
                if _value_at(self, key) is not None:
                    raise broken_rule(key, "it must be null: the verdict is unmeasured")
            return self
        for key in _NULL_ONLY_IF_UNMEASURED:
            if _value_at(self, key) is None:
                raise broken_rule(
                    key,
                    "it is null, which only an unmeasured profile may have; the verdict is "
                    f"{self.verdict}",
                )
        for key in _DRAFT_FIGURES:
            if (_value_at(self.measured, key) is None) != (not self.measured_recipe.drafters):
                raise broken_rule(f"measured.{key}", "it is null exactly where nothing is drafted")
        counted = [counts.kind for counts in _value_at(self, "measured.by_drafter")]
        if counted and counted != [drafter.kind for drafter in self.measured_recipe.drafters]:
            raise broken_rule(
                "measured.by_drafter", "it counts the drafters of the recipe, in their order"
            )
        return self


def _unmeasured_cost(drafter: DrafterSpec, n_layers: int) -> DrafterCost:
    mask = drafter.mask(n_layers)
    beta = 0.0 if mask is None else 1 - mask.n_skipped / (2 * n_layers)
    if drafter.draft_model is not None:
        beta = min(1.0, drafter.draft_model.n_layers / n_layers)
    if drafter.reading.bits is not None:
        beta *= drafter.reading.bits / UNMEASURED_BITS
    return DrafterCost(beta, UNMEASURED_VERIFY_RATIO, 3.0, 0.3)


def _value_at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = getattr(value, key)
    return value


class _AllKeysRequired(GenerateJsonSchema):
    """A schema generator that marks each key that the loader requires, even with a default."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return "serialization_exclude_if" not in field


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the current version, for editors.

    It lacks the rules between keys, which only the loader checks.
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Profile.model_json_schema(
        schema_generator=_AllKeysRequired
    )
