"""The profile, version 2: what a recipe is for, what was measured with it, and with which versions.

Every model here is frozen, refuses unknown keys and coerces nothing (`true` is not 1, `"3"` is not 3). Keys stand in the order
in which they are written. A key that may be `null` is still written, unless its description says that it is left out.

`verdict` says what the rest means:

    speculate   the recipe in `drafters` was measured on held-out prompts and is what decoding should use.
    plain       nothing beat autoregressive decoding here, so decoding runs plain: `drafters` is empty. `lost` and `measured` document the
                best candidate that lost. If none was worth measuring, `lost` is empty too, and what only drafting has (`alpha`,
                `accepted_fraction`, `beta`, `verify_ratio`) is null.
    unmeasured  imported from elsewhere: `engine`, `hardware`, `measured` and `software` are null, and so is whatever its source
                does not tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator
from pydantic.json_schema import GenerateJsonSchema

from skipsearch.errors import MaskError
from skipsearch.fields import (
    Count,
    Date,
    Dtype,
    GitCommit,
    Name,
    Part,
    Sha256,
    Temperature,
    Text,
    TopK,
    TopP,
    broken_rule,
    left_out,
)
from skipsearch.mask import SkipMask
from skipsearch.profile.measured import BatchSpeed, ContextTokens, DrafterCounts, Lossless, Measured, Stream, StreamPart
from skipsearch.recipe import DRAFTERS, DrafterSpec, Recipe, union_of
from skipsearch.stats import Price

__all__ = ["BatchSpeed", "ContextTokens", "DrafterCounts", "Lossless", "Measured", "Profile", "Stream", "StreamPart", "json_schema"]

SCHEMA_VERSION = 2
UNMEASURED_VERIFY_RATIO = 1.2   # of a few rows, where nobody measured it; about what CPUs and GPUs take at batch size one


class ModelInfo(Part):
    id: Text = Field(description="`demo`, a Hub id, or the name of a local folder")
    revision: Text | None = Field(description="Hub revision; null where there is none")
    family: Name = Field(description="architecture, by its row in the table of families")
    n_layers: int = Field(ge=1, le=1024, description="decoder layers, 1..1024")
    config_sha256: Sha256 | None = Field(description="hash of the model's configuration; null only if unmeasured")
    weights_sha256: Sha256 | None = Field(description="hash of the model's weights; null only if unmeasured")
    dtype: Dtype | None = Field(description="type the weights ran in; null only if unmeasured")
    quantization: Text | None = Field(description="quantisation method; null if none")


class Sampling(Part):
    temperature: Temperature = Field(description="0..100, no unit; 0 is greedy")
    top_p: TopP = Field(description="probability mass kept, 0 < top_p <= 1; 1 keeps all")
    top_k: TopK = Field(description="tokens kept, 0..10,000,000; 0 keeps all")


class TaskInfo(Part):
    name: Name = Field(description="task; `any` is used wherever a task has no profile of its own")
    version: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        description="version of the task's manifest, from 1; null only if unmeasured")
    calibration_sha256: Sha256 | None = Field(description="hash of the calibration text; null only if unmeasured")
    chat_template_sha256: Sha256 | None = Field(
        default=None, exclude_if=left_out,
        description="hash of the chat template that prompts were put into; left out if they went in as they are")
    sampling: Sampling


class Hardware(Part):
    kind: Literal["cpu", "cuda", "mps"]
    name: Text = Field(description="the device's own name")
    count: int = Field(ge=1, le=4096, description="devices used, 1..4096")
    threads: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        description="CPU threads used, 1..4096; null where they do not matter")


if TYPE_CHECKING:
    AnyDrafter = DrafterSpec
else:
    AnyDrafter = union_of(DRAFTERS)
MOST_DRAFTERS = 8
Drafters = Annotated[tuple[AnyDrafter, ...], Field(strict=False, max_length=MOST_DRAFTERS)]


class Software(Part):
    skipsearch: Text
    torch: Text
    transformers: Text
    cuda: Text | None


class Provenance(Part):
    searcher: Name = Field(description="searcher that proposed the mask; `import` for one from elsewhere")
    objective: Literal["replay", "wall"] | None = Field(description="what the search minimised; null only if unmeasured")
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        description="seed of the search, 0..2**63-1; null only if unmeasured")
    trials: Count | None = Field(description="masks judged; null only if unmeasured")
    search_seconds: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        description="length of the search, seconds, 0..1e9; null only if unmeasured")
    created: Date | None = Field(description="ISO 8601 date or time; null only if unmeasured")
    commit: GitCommit | None = Field(description="commit of the skipsearch that wrote it; null outside a checkout")
    source: Text | None = Field(default=None, exclude_if=left_out, description="where an imported mask comes from; left out if null")


_DRAFT_FIGURES = ("alpha", "accepted_fraction", "beta", "verify_ratio")
_ONLY_UNMEASURED_LACKS = (
    "engine", "hardware", "software", "measured", "model.dtype", "model.config_sha256", "model.weights_sha256", "task.version",
    "task.calibration_sha256", "provenance.objective", "provenance.seed", "provenance.trials", "provenance.search_seconds",
    "provenance.created")
_UNMEASURED_LACKS = ("engine", "hardware", "software", "measured")


class Profile(Part):
    """One recipe for one model, task and device, and the evidence for it."""

    schema_version: Literal[2]
    model: ModelInfo
    task: TaskInfo
    hardware: Hardware | None
    engine: Name | None = Field(description="engine that was measured; null only if unmeasured")
    verdict: Literal["speculate", "plain", "unmeasured"]
    drafters: Drafters = Field(description="asked in this order in every round, the first that proposes something drafts; at most 8, and "
                                           "empty exactly if the verdict is plain")
    lost: Drafters = Field(description="of a plain verdict: the drafters of the best candidate that lost; else empty")
    measured: Measured | None
    software: Software | None
    provenance: Provenance

    _folder: Path | None = PrivateAttr(default=None)

    def at(self, folder: Path) -> Profile:
        """The same, as it lies in this folder."""
        moved = self.model_copy()
        moved._folder = folder
        return moved

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the trained parts that it names may lie: its own folder and the one above, which a model's tasks share. Empty if it was not
        loaded from a file."""
        return () if self._folder is None else (self._folder, self._folder.parent)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.model_dump() == other.model_dump()   # wherever they lie

    def __hash__(self) -> int:
        return hash((self.model, self.task, self.hardware, self.drafters))

    @property
    def recipe(self) -> Recipe:
        """What decoding runs."""
        return Recipe(self.drafters)

    @property
    def candidate(self) -> Recipe:
        """What was measured: for a plain verdict, the best candidate that lost."""
        return Recipe(self.drafters or self.lost)

    @property
    def prices(self) -> tuple[Price | None, ...]:
        """What the guard weighs each drafter of the candidate by. Of a profile that was not measured: the share of sub-layers that a draft
        keeps for β, and `UNMEASURED_VERIFY_RATIO` for v."""
        found, drafters = self.measured, self.candidate.drafters
        if found is None:
            return tuple(_unmeasured_price(drafter, self.model.n_layers) for drafter in drafters)
        if found.by_drafter:
            return tuple(counts.price for counts in found.by_drafter)
        if len(drafters) == 1 and found.accepted_fraction and found.beta is not None and found.verify_ratio is not None:
            drafted = (found.tau - 1) / found.accepted_fraction   # version 1 kept no counts, and these are means over all rounds
            return (Price(found.beta, found.verify_ratio, drafted, found.tau - drafted * found.beta - found.verify_ratio),)
        return (None,) * len(drafters)

    @property
    def plain_from(self) -> int | None:
        """Requests side by side from which on plain decoding is faster; None where that is not known."""
        return None if self.measured is None else self.measured.plain_from

    @property
    def mask(self) -> SkipMask:
        """What the candidate's first drafter with a mask leaves out; an empty mask if no drafter has one."""
        return self.candidate.mask(self.model.n_layers) or SkipMask(self.model.n_layers)

    @model_validator(mode="after")
    def _recipe_fits_the_model(self) -> Profile:
        for key, drafters in (("drafters", self.drafters), ("lost", self.lost)):
            for i, drafter in enumerate(drafters):
                try:
                    mask = drafter.mask(self.model.n_layers)
                except MaskError as error:
                    raise broken_rule(f"{key}.{i}", str(error)) from error
                if mask is not None and not mask.n_skipped:
                    raise broken_rule(f"{key}.{i}", "it skips nothing, so it is no draft")
                if drafter in drafters[:i]:
                    raise broken_rule(f"{key}.{i}", f"it is the same as {key}[{drafters.index(drafter)}], which is asked before it, so it "
                                                    "never drafts; remove it")
        if self.verdict == "plain" and self.drafters:
            raise broken_rule("drafters", "the verdict is plain, so drafters must be []; or set verdict: speculate")
        if self.verdict != "plain" and not self.drafters:
            raise broken_rule("drafters", f"the verdict is {self.verdict}, so drafters must not be []; or set verdict: plain")
        if self.lost and self.verdict != "plain":
            raise broken_rule("lost", "only a plain verdict has candidates that lost")
        return self

    @model_validator(mode="after")
    def _verdict_fits_the_evidence(self) -> Profile:
        if self.verdict == "unmeasured":
            for key in _UNMEASURED_LACKS:
                if _at(self, key) is not None:
                    raise broken_rule(key, "it must be null: the verdict is unmeasured")
            return self
        for key in _ONLY_UNMEASURED_LACKS:
            if _at(self, key) is None:
                raise broken_rule(key, f"it is null, which only an unmeasured profile may have; the verdict is {self.verdict}")
        for key in _DRAFT_FIGURES:
            if (_at(self.measured, key) is None) != (not self.candidate.drafters):
                raise broken_rule(f"measured.{key}", "it is null exactly where nothing is drafted")
        counted = [counts.kind for counts in _at(self, "measured.by_drafter")]
        if counted and counted != [drafter.kind for drafter in self.candidate.drafters]:
            raise broken_rule("measured.by_drafter", "it counts the drafters of the recipe, in their order")
        return self


def _unmeasured_price(drafter: DrafterSpec, n_layers: int) -> Price:
    mask = drafter.mask(n_layers)
    beta = 0.0 if mask is None else 1 - mask.n_skipped / (2 * n_layers)
    return Price(beta, UNMEASURED_VERIFY_RATIO, 3.0, 0.3)


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = getattr(value, key)
    return value


class _EveryKeyWritten(GenerateJsonSchema):
    """As the loader has it: only what may be left out need not be there, whatever has a default in Python."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return "serialization_exclude_if" not in field


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the current version, for editors. Rules between keys are the loader's alone."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Profile.model_json_schema(schema_generator=_EveryKeyWritten)
