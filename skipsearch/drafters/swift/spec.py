"""`swift`: searches the mask during decoding, by how well it predicts the text of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from skipsearch.core.recipe import DrafterInfo, ReadingSpec
from skipsearch.core.schema_types import (
    Fraction,
    FrozenModel,
    Layers,
    broken_rule,
    is_falsy,
    is_none,
)
from skipsearch.drafters.skip.spec import AnyExit

if TYPE_CHECKING:
    from skipsearch.drafters.base import Drafter
    from skipsearch.models.adapter import ModelAdapter

Count = Annotated[int, Field(ge=1, le=100_000)]
Width = Annotated[int, Field(ge=1, le=16)]


class SiblingSchedule(FrozenModel):
    """A rule for the number of candidates at each draft position, by its top probability.

    `widths[0]` candidates are verified if the probability is above `thresholds[0]`, else
    `widths[1]` if it is above `thresholds[1]`, and so on; the last of `widths` if it is above no
    threshold. The draft token itself is counted. Published: thresholds 0.95, 0.8, 0.5 with widths
    3, 5, 8, 10, or 1, 3, 5, 10 for sampling.
    """

    thresholds: Annotated[tuple[Fraction, ...], Field(strict=False, min_length=1, max_length=8)] = (
        Field(description="top probabilities, descending, 0..1")
    )
    widths: Annotated[tuple[Width, ...], Field(strict=False, max_length=9)] = Field(
        description="candidates, one number more than there are thresholds, 1..16 each"
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> SiblingSchedule:
        if len(self.widths) != len(self.thresholds) + 1:
            raise broken_rule(
                "widths",
                f"it has one number more than thresholds, which has {len(self.thresholds)}",
            )
        if list(self.thresholds) != sorted(set(self.thresholds), reverse=True):
            raise broken_rule("thresholds", "each is below the one before it")
        return self

    @property
    def most(self) -> int:
        return max(self.widths) - 1

    def count_for(self, confidence: float) -> int:
        step = next((i for i, t in enumerate(self.thresholds) if confidence > t), -1)
        return self.widths[step] - 1


class InitialMask(FrozenModel):
    """The mask at the start, such as the result of an earlier search."""

    attn: Layers = Field(description="layers whose attention is skipped, 0..n_layers-1, ascending")
    mlp: Layers = Field(description="layers whose MLP is skipped, 0..n_layers-1, ascending")


class SWIFT(ReadingSpec):
    """Searches its mask during decoding.

    Every few rounds, another mask with the same number of skipped sub-layers is tried on the latest
    `window` tokens of the text, in one pass. It replaces the current mask if it predicts more of
    these tokens. Both masks are compared on the same tokens, each token after the full model's K/V;
    the initial mask is scored in the same way. The first and the last layer are never skipped.

    The state of the search persists across the requests of a decoder. Greedy text does not depend
    on it; a sample may, but its distribution does not.

    faithful: follow the published search. A mask is scored on the first generated tokens, by one
    pass under the mask over them. It is adopted if its share of correct tokens is above the best
    share of any text so far, where the initial mask counts as 0. The Gaussian process learns from
    points between 0 and 1, whose highest coordinates are skipped. Published steps that are not
    lossless are left out. Source: SWIFT (Xia et al. 2025), section 4 and its code.
    """

    kind: Literal["swift"] = "swift"
    info = DrafterInfo(
        "SWIFT (Xia et al. 2025)",
        "a stream of requests, or long ones, over which it searches; no training",
        "lookup before it; a tree of candidates",
    )
    dynamic_mask = True
    skip_ratio: Fraction = Field(
        default=0.45,
        description="share of the sub-layers between first and last layer to skip, 0..1",
    )
    window: Count = Field(default=32, description="tokens that a mask is tried on")
    interval: Count = Field(default=1, description="rounds from one trial to the next")
    bayes_interval: Count = Field(
        default=25,
        description="every so many trials a Gaussian process proposes, at the others chance does",
    )
    max_score: Fraction = Field(
        default=0.95, description="share of named tokens that ends the search, 0..1"
    )
    tolerance: Count = Field(default=300, description="trials without a gain that end the search")
    most_trials: Count = Field(default=1000, description="trials that end the search")
    seed: Annotated[int, Field(ge=0, le=2**31)] = Field(
        default=0, description="of the masks that chance proposes"
    )
    faithful: bool = Field(
        default=False,
        exclude_if=is_falsy,
        description="whether masks are judged as published; left out if not",
    )
    tree: SiblingSchedule | None = Field(
        default=None,
        exclude_if=is_none,
        description="candidates beside drafted tokens; left out: none",
    )
    warm: InitialMask | None = Field(
        default=None,
        exclude_if=is_none,
        description="the mask to start from; left out: every second layer",
    )
    exit: AnyExit

    def build(self, model: ModelAdapter, module_folders: Sequence[Path]) -> Drafter:
        from skipsearch.drafters.reduced_session import reduce_reading
        from skipsearch.drafters.swift.session import SWIFTDrafter

        return reduce_reading(SWIFTDrafter(self, model), model, self.reading)

    @property
    def scratch_slots(self) -> int:
        return max(self.window, self.draft_length * self.tree.most if self.tree else 0)

    def __str__(self) -> str:
        every = f" every {self.interval} rounds" if self.interval > 1 else ""
        tree = f", up to {self.tree.most + 1} candidates a token" if self.tree else ""
        return (
            f"swift{' as published' if self.faithful else ''} skips {self.skip_ratio:.0%}, "
            f"tries masks on {self.window} tokens{every}, "
            f"{self.exit}, up to {self.draft_length}{self.format_reading()}{tree}"
        )
