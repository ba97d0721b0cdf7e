"""`asd`: chooses the mask of a request from its prompt, and skips attention of little effect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from skipsearch.core.recipe import DrafterInfo, ReadingSpec
from skipsearch.core.schema_types import Fraction
from skipsearch.drafters.skip.spec import AnyExit

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter


class ASD(ReadingSpec):
    """Chooses one mask for each request during the prefill.

    The mask skips each attention whose cosine reaches `threshold`, and every m-th layer, but
    nothing in the last n layers. The cosine is between the residual stream before and after the
    attention, and a mean over the prompt. If a session's cache has the first part of the prompt, it
    is a mean over the rest. In the paper, the exit policy is Draft & Verify's adaptive one. Source:
    Metel et al. 2024, section 3.2 and algorithm 1.
    """

    kind: Literal["asd"] = "asd"
    info = DrafterInfo(
        "Draft on the Fly (Metel et al. 2024)",
        "states from the prompt's own prefill; no training, no calibration text",
        "lookup before it",
    )
    dynamic_mask = True
    threshold: Fraction = Field(
        default=0.985, description="mean cosine from which an attention is left out, 0..1"
    )
    every: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=3, description="every so many layers one is left out; 0 leaves out none"
    )
    keep_last: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=2, description="last layers that are always kept"
    )
    exit: AnyExit

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.asd.session import ASDDrafter
        from skipsearch.drafters.reduced_session import reduce_reading

        return reduce_reading(ASDDrafter(self, model), model, self.reading)

    def __str__(self) -> str:
        return (
            f"asd from cosine {self.threshold:g}, every {self.every}, keeps the last "
            f"{self.keep_last}{self.format_reading()}, {self.format_limits()}"
        )
