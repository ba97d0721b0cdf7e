"""`clasp`: plans the mask every few rounds, from the last token's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from skipsearch.core.recipe import DrafterInfo, ReadingSpec
from skipsearch.core.schema_types import Layers, is_falsy
from skipsearch.drafters.skip.spec import AnyExit

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter


class CLaSp(ReadingSpec):
    """Plans its mask from the full model's hidden states at the last verified token.

    The first plan is made at the last token of the prompt, further plans after every `interval`
    rounds or tokens. The unit `sublayer` extends the paper: attention and MLP are skipped
    separately. It needs a model without a parallel residual. Source: CLaSp, section 3 and algorithm
    1.
    """

    kind: Literal["clasp"] = "clasp"
    info = DrafterInfo(
        "CLaSp (2025)",
        "at each plan, one pass with a row for each skipped unit; no training, no calibration text",
        "lookup before it",
    )
    dynamic_mask = True
    skip: Annotated[int, Field(ge=1, le=2047)] = Field(
        description="units that the draft skips, from 1 to one less than there are"
    )
    unit: Literal["layer", "sublayer"] = Field(
        default="layer", description="what is skipped as one: layer or sublayer"
    )
    interval: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=8, description="rounds or tokens from one plan to the next"
    )
    interval_unit: Literal["rounds", "tokens"] = Field(
        default="rounds", description="what the interval counts: rounds or tokens"
    )
    never_skip: Layers = Field(
        default=(), exclude_if=is_falsy, description="layers that are always kept; left out: none"
    )
    exit: AnyExit

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.clasp.session import CLaSpDrafter
        from skipsearch.drafters.reduced_session import reduce_reading

        return reduce_reading(CLaSpDrafter(self, model), model, self.reading)

    @property
    def scratch_slots(self) -> int:
        return self.skip + 1

    def __str__(self) -> str:
        unit = "layers" if self.unit == "layer" else "sub-layers"
        return (
            f"clasp skips {self.skip} {unit}, plans every {self.interval} {self.interval_unit}, "
            f"{self.exit}{self.format_reading()}, up to {self.draft_length}"
        )
