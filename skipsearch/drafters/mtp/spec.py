"""`mtp`: a head drafts from the model's last hidden state and the next token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import DraftWeights, is_stored
from skipsearch.core.recipe import DrafterInfo, DrafterSpec, DraftSiblings, DraftVocabulary
from skipsearch.core.schema_types import ModuleRef, is_none
from skipsearch.drafters.skip.spec import AnyExit

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter


class Mtp(DrafterSpec):
    """Drafts with a head of one layer, which reads the output of the model's last layer.

    The head drafts token by token. Each step reads the output of the step before, until the exit
    policy ends the draft. Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; FastMTP
    (2509.18362).
    """

    kind: Literal["mtp"] = "mtp"
    info = DrafterInfo(
        "DeepSeek-V3 (2024), FastMTP (2025)",
        "a head that the model ships, or that `train mtp` makes",
        "lookup before it; siblings",
    )
    exit: AnyExit
    siblings: DraftSiblings = None
    weights: DraftWeights = Field(
        default="stored",
        exclude_if=is_stored,
        description="number format of a trained head; left out: that of the model's weights",
    )
    vocabulary: DraftVocabulary = None
    module: ModuleRef | None = Field(
        default=None,
        exclude_if=is_none,
        description="the trained head; left out: the one that the model ships",
    )

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.mtp.session import make_mtp_drafter

        return make_mtp_drafter(self, model, module_folders)

    def mask(self, n_layers: int) -> SkipMask:
        """Return the mask whose draft pass costs as much as the head: it keeps the last layer."""
        return SkipMask.from_layers(n_layers, range(n_layers - 1))
