"""`clasp`: the mask is planned again every few rounds, by a dynamic programme over the hidden states of the last verified token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from skipsearch.drafters.base import DecodeContext, Drafter
from skipsearch.drafters.choosing import ChoosingDrafter, sequential
from skipsearch.drafters.skip import AnyExit
from skipsearch.errors import MaskError
from skipsearch.fields import Layers, left_out
from skipsearch.mask import SkipMask
from skipsearch.recipe import About, DrafterSpec

if TYPE_CHECKING:   # reading a profile needs no torch
    from torch import Tensor

    from skipsearch.cache import KVCache, PassPlan
    from skipsearch.engine import Tap
    from skipsearch.models.spec import ModelAdapter
    from skipsearch.programme import Step


class CLaSp(DrafterSpec):
    """Plans which layers to skip from the full model's own states at the last verified token, again after every `interval` rounds or
    tokens. The first plan is made at the last token of the prompt.

    unit `sublayer` is an extension of the paper: attention and MLP are skipped one by one, which a parallel residual does not allow.
    Source: CLaSp, section 3 and algorithm 1.
    """

    kind: Literal["clasp"] = "clasp"
    about = About("CLaSp (2025)", "at each plan, one pass with a row for each skipped unit; no training, no calibration text",
                  "lookup before it")
    moves = True
    skip: Annotated[int, Field(ge=1, le=2047)] = Field(description="units that the draft skips, from 1 to one less than there are")
    unit: Literal["layer", "sublayer"] = Field(default="layer", description="what is skipped as one: layer or sublayer")
    interval: Annotated[int, Field(ge=1, le=100_000)] = Field(default=8, description="rounds or tokens from one plan to the next")
    interval_unit: Literal["rounds", "tokens"] = Field(default="rounds", description="what the interval counts: rounds or tokens")
    never_skip: Layers = Field(default=(), exclude_if=left_out, description="layers that are always kept; left out: none")
    exit: AnyExit

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        if self.unit == "sublayer" and not sequential(model):
            raise MaskError(f"clasp plans whole layers on {model.spec.id}, whose attention and MLP read one state, so that there is none "
                            "between them: write unit: layer")
        steps = self.steps(model.spec.n_layers)
        return ChoosingDrafter(lambda: LastToken(self, model, steps), self.exit)  # type: ignore[return-value]

    def steps(self, n_layers: int) -> list[Step]:
        """The rows of the programme for a model of so many layers."""
        from skipsearch.programme import Step

        free = [i not in self.never_skip for i in range(n_layers)]
        if self.unit == "layer":
            return [Step(i, True, True, free[i]) for i in range(n_layers)]
        return [Step(i, attn, not attn, free[i]) for i in range(n_layers) for attn in (True, False)]

    @property
    def scratch(self) -> int:
        return self.skip + 1

    def __str__(self) -> str:
        unit = "layers" if self.unit == "layer" else "sub-layers"
        return f"clasp skips {self.skip} {unit}, plans every {self.interval} {self.interval_unit}, {self.exit}, up to {self.draft_length}"


class LastToken:
    """Keeps the states of the passes that a plan may be made from, and plans."""

    def __init__(self, spec: CLaSp, model: ModelAdapter, steps: Sequence[Step]):
        self.spec, self.model, self.steps = spec, model, steps
        self.states: list[Tensor] = []     # [1, rows, H] before each layer and behind the last, of the latest pass that was watched
        self.since = 0                     # rounds or tokens since the last plan
        self.begun = False

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        if self.begun and self.since + 1 < self.spec.interval:   # this round is the next plan's at the earliest
            self.states = []
            return None
        self.states = []

        def look(i: int, h: Tensor) -> None:
            # Of the prompt its last token is wanted; of a verify pass, nobody knows yet which one will be the last that stands.
            self.states.append(h[:, :rows] if self.begun else h[:, rows - 1:rows])

        return look

    def first(self, ctx: DecodeContext) -> SkipMask:
        self.begun = True
        return self._planned(ctx, 0)

    def next(self, ctx: DecodeContext, path: Sequence[int]) -> SkipMask | None:
        self.since += 1 if self.spec.interval_unit == "rounds" else 1 + len(path)
        if self.since < self.spec.interval or not self.states:
            return None
        return self._planned(ctx, path[-1] if path else 0)

    def _planned(self, ctx: DecodeContext, row: int) -> SkipMask:
        """From the states of one row, which stands in the last committed slot."""
        import torch

        from skipsearch.programme import solve_token

        self.since = 0
        device, n = self.model.spec.device, ctx.cache.length
        states = torch.stack([h[0, row].to(device) for h in self.states])                       # [L + 1, H]
        rows = min(self.spec.skip, sum(step.free for step in self.steps)) + 1
        place = torch.full((1, rows), n - 1, device=device)   # the committed slot n − 1 stays hidden, else the token would count twice
        plan = ctx.planner.anchored(n, place, place, torch.arange(rows, device=device))

        def run(layer: int, g: Tensor, attn: bool, mlp: bool) -> Tensor:
            return self.model.block(layer, g[None], ctx.cache, plan, attn=attn, mlp=mlp)[0].to(device)

        skipped = solve_token(states, self.steps, run, min(self.spec.skip, self.model.spec.n_layers * (2 if self._halves else 1) - 1))
        sublayers = {s for step in skipped for s in step.sublayers}
        return SkipMask.from_sublayers(self.model.spec.n_layers, sublayers)

    @property
    def _halves(self) -> bool:
        return self.spec.unit == "sublayer"
