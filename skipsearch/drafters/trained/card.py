"""A module's card: its kind, its model, and its training.

The card is in the header of the module file, so that it can be checked before a tensor is read.
This file does not import torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skipsearch.core.mask import SkipMask
from skipsearch.core.reading import Vocabulary
from skipsearch.core.schema_types import (
    Count,
    Date,
    FrozenModel,
    Layers,
    Name,
    Sha256,
    Text,
    broken_rule,
    is_none,
)
from skipsearch.errors import MaskError

Seconds = Annotated[float, Field(ge=0, le=1e9)]


class TrainedFor(FrozenModel):
    """The model that a module was trained for. Verification runs this model unchanged."""

    id: Text
    family: Name
    n_layers: int = Field(ge=1, le=1024)
    weights_sha256: Sha256 | None = Field(
        description="null where the model was not loaded from files"
    )
    quantization: Text | None = Field(
        default=None,
        exclude_if=is_none,
        description="the format of the weights and the rounding of activations that it imitates; "
        "left out: it was trained on unquantised passes",
    )


class TrainingRecord(FrozenModel):
    """The training of a module.

    text: description of the training text. licence: licence of this text. Of a training that
    continued from a module, tokens, rows, steps and seconds include that module's, and `before` is
    the module's agreement.
    """

    text: Text
    licence: Text
    tokens: Count = Field(description="tokens of text that the full model read for it")
    rows: Count = Field(description="draft rows that were trained on")
    steps: Count
    seconds: Seconds
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    device: Text
    dtype: Text = Field(description="that the passes were computed in")
    created: Date
    before: Annotated[float, Field(ge=0, le=1)] = Field(
        description="share of tokens of text kept aside that the draft named as the full "
        "model does, before training"
    )
    after: Annotated[float, Field(ge=0, le=1)] = Field(
        description="the same, of the module as it is stored"
    )


FORMS = {
    "adapted": ("copy", "lora"),
    "kangaroo": ("attention", "layer"),
    "s3d": ("embeddings", "lora"),
    "mtp": ("layer",),
}
BlockFormat = Literal["Q4_0", "Q5_0", "Q8_0"]
BLOCK_VALUES = 32
BLOCK_BYTES: dict[BlockFormat, int] = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34}
BLOCKS_BY_BITS: dict[int, BlockFormat] = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}
ExitLayer = Annotated[int, Field(ge=1, le=1023)]


class ModuleCard(FrozenModel):
    """The card of a module.

    Forms of `adapted`: `copy`, trained copies of the sub-layers' weights; `lora`, low-rank updates
    of rank `rank`. Forms of `kangaroo`: `attention`, an attention sub-layer and a norm; `layer`,
    also an MLP. Forms of `s3d`: `embeddings` alone; `lora`, also low-rank updates. `mtp` has the
    form `layer`, and its mask keeps the model's last layer, from which the head begins.
    """

    kind: Literal["adapted", "kangaroo", "s3d", "mtp"]
    base: TrainedFor
    attn: Layers = Field(description="layers whose attention the draft skips")
    mlp: Layers = Field(description="layers whose MLP the draft skips")
    form: Literal["copy", "lora", "attention", "layer", "embeddings"]
    rank: Annotated[int, Field(ge=1, le=4096)] | None = Field(description="of `lora`; else null")
    exit_layer: ExitLayer | None = Field(
        default=None,
        description="of `kangaroo`: the first layer that the draft does not run; else null",
    )
    vocabulary: Vocabulary | None = Field(
        default=None,
        exclude_if=is_none,
        description="of `mtp`: the tokens that the head was trained to draft; left out: all",
    )
    blocks: BlockFormat | None = Field(
        default=None,
        exclude_if=is_none,
        description="the format of GGUF in which the file has matrices; left out: as numbers",
    )
    trained: TrainingRecord

    @property
    def bits(self) -> int | None:
        """Bits of a weight in blocks; None: the file has no blocks."""
        return next((bits for bits, name in BLOCKS_BY_BITS.items() if name == self.blocks), None)

    @property
    def mask(self) -> SkipMask:
        """The mask of the draft. All sub-layers that it does not skip are trained."""
        return SkipMask(self.base.n_layers, self.attn, self.mlp)

    @model_validator(mode="after")
    def _check_consistency(self) -> ModuleCard:
        try:
            mask = self.mask
        except MaskError as error:
            raise broken_rule("attn", str(error)) from error
        if mask.n_skipped == 2 * self.base.n_layers:
            raise broken_rule(
                "attn", "it skips everything, so nothing is left that could be trained"
            )
        if (self.form == "lora") != (self.rank is not None):
            raise broken_rule("rank", "it is a number for lora and null for any other form")
        if self.form not in FORMS[self.kind] or (self.kind == "kangaroo") != (
            self.exit_layer is not None
        ):
            raise broken_rule(
                "form",
                f"{self.kind} has one of these: {', '.join(FORMS[self.kind])}; and only kangaroo "
                "an exit_layer",
            )
        if self.exit_layer is not None and mask != SkipMask.from_layers(
            mask.n_layers, range(self.exit_layer, mask.n_layers)
        ):
            raise broken_rule(
                "exit_layer", "the draft skips every layer from there on, and no other"
            )
        return self
