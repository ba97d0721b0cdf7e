"""`asd`: the mask of a request is read off its prompt: attention that hardly turns the residual stream is left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from skipsearch.admg import admg
from skipsearch.drafters.base import DecodeContext, Drafter
from skipsearch.drafters.choosing import ChoosingDrafter, sequential
from skipsearch.drafters.skip import AnyExit
from skipsearch.fields import Fraction
from skipsearch.mask import SkipMask
from skipsearch.recipe import About, DrafterSpec

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.cache import KVCache, PassPlan
    from skipsearch.engine import Between, Tap
    from skipsearch.models.spec import ModelAdapter


class ASD(DrafterSpec):
    """One mask for each request, chosen while its prompt is read: every attention whose output points where its input did, and every m-th
    layer, but never the last n. Its exit in the paper is Draft & Verify's adaptive one.

    The cosines are means over the prompt, between the residual stream before and behind an attention. Where a session has part of the
    prompt in its cache, they are means over the rest. Source: Metel et al. 2024, section 3.2 and algorithm 1.
    """

    kind: Literal["asd"] = "asd"
    about = About("Draft on the Fly (Metel et al. 2024)", "states from the prompt's own prefill; no training, no calibration text",
                  "lookup before it")
    moves = True
    threshold: Fraction = Field(default=0.985, description="mean cosine from which an attention is left out, 0..1")
    every: Annotated[int, Field(ge=0, le=1024)] = Field(default=3, description="every so many layers one is left out; 0 leaves out none")
    keep_last: Annotated[int, Field(ge=0, le=1024)] = Field(default=2, description="last layers that are always kept")
    exit: AnyExit

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        in_turn = sequential(model)
        return ChoosingDrafter(lambda: PromptCosines(self, model.spec.n_layers, in_turn), self.exit)  # type: ignore[return-value]

    def __str__(self) -> str:
        return (f"asd from cosine {self.threshold:g}, every {self.every}, keeps the last {self.keep_last}, {self.exit}, up to "
                f"{self.draft_length}")


class PromptCosines:
    """Sums cosines over the passes of a prefill, in however many pieces it comes, then decides once.

    in_turn: the MLP of a layer reads what its attention made, so the pass itself comes by that state.
    """

    def __init__(self, spec: ASD, n_layers: int, in_turn: bool):
        self.spec, self.n_layers, self.in_turn, self.rows, self.decided = spec, n_layers, in_turn, 0, False
        self._sums: list[Tensor] = []

    @property
    def sums(self) -> list[float]:
        """Of each attention, over the rows read so far."""
        return [float(total) for total in self._sums]

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        if self.decided:
            return None
        import torch

        self.rows += rows

        def compare(i: int, before: Tensor, behind: Tensor) -> None:
            cosines = torch.nn.functional.cosine_similarity(before[0, :rows].float(), behind[0, :rows].to(before.device).float(), dim=-1)
            if i == len(self._sums):
                self._sums.append(cosines.sum())
            else:
                self._sums[i] = self._sums[i] + cosines.sum()

        def look(i: int, h: Tensor) -> Between | None:
            if i == self.n_layers:
                return None
            if self.in_turn:
                return lambda behind: compare(i, h, behind)
            compare(i, h, model.block(i, h, cache, plan, mlp=False))   # the pass itself writes over the K/V of this
            return None

        return look

    def first(self, ctx: DecodeContext) -> SkipMask:
        self.decided = True
        return self.mask(self.spec)

    def mask(self, spec: ASD) -> SkipMask:
        """The one that these settings choose for what was read so far."""
        cosines = [s / max(1, self.rows) for s in self.sums or [0.0] * self.n_layers]
        return SkipMask(len(cosines), *admg(cosines, spec.threshold, spec.every, spec.keep_last))

    def next(self, ctx: DecodeContext, path: Sequence[int]) -> SkipMask | None:
        return None
