"""`kangaroo`: the model's first layers draft, followed by a trained adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import DrafterInfo, DrafterSpec, DraftSiblings, DraftVocabulary
from skipsearch.core.schema_types import ModuleRef
from skipsearch.drafters.skip.spec import AnyExit

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter


class Kangaroo(DrafterSpec):
    """Drafts by double early exiting.

    A draft pass ends at `exit_layer`, and the exit policy ends a draft.

    The paper's settings are an exit after 2 or 3 layers, confidence 0.6, up to 6 tokens; the last
    token, with low confidence, is verified too. Verification resumes at the exit layer. If the
    engine captures whole passes (graph), or if passes are exact, it begins at layer 0: the tokens
    are the same, but it is slower. Source: Kangaroo (Liu et al. 2024), section 3.
    """

    kind: Literal["kangaroo"] = "kangaroo"
    info = DrafterInfo(
        "Kangaroo (Liu et al. 2024)",
        "an adapter that `train kangaroo` makes",
        "lookup before it; siblings",
    )
    exit_layer: Annotated[int, Field(ge=1, le=1023)] = Field(
        description="layers that the draft runs"
    )
    exit: AnyExit
    siblings: DraftSiblings = None
    vocabulary: DraftVocabulary = None
    module: ModuleRef = Field(description="the trained adapter")

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.kangaroo.session import make_kangaroo_drafter

        return make_kangaroo_drafter(self, model, module_folders)

    def mask(self, n_layers: int) -> SkipMask:
        """Return the mask that skips all layers from the exit on.

        Raises: MaskError if the model has no such layer.
        """
        return SkipMask.from_layers(
            n_layers, range(self.exit_layer, max(n_layers, self.exit_layer + 1))
        )

    def __str__(self) -> str:
        return f"kangaroo at layer {self.exit_layer}{self.format_reading()}, {self.format_limits()}"
