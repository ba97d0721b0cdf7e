"""`kangaroo`: the model's first layers and a trained adapter draft; they stop early in depth, and early in length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.drafters.skip import AnyExit
from skipsearch.exits import Exit
from skipsearch.fields import ModuleRef
from skipsearch.mask import SkipMask
from skipsearch.recipe import About, DrafterSpec

if TYPE_CHECKING:
    from skipsearch.models.spec import ModelAdapter
    from skipsearch.modules.kangaroo import Shallow


class Kangaroo(DrafterSpec):
    """Double early exiting: each draft pass leaves the model at `exit_layer`, and a round ends where the exit policy says so.

    The paper's settings are an exit after 2 or 3 layers, confidence 0.6, up to 6 tokens; the token that the draft is unsure of is verified
    too. Source: Kangaroo (Liu et al. 2024), section 3.
    """

    kind: Literal["kangaroo"] = "kangaroo"
    about = About("Kangaroo (Liu et al. 2024)", "an adapter that `train kangaroo` makes", "lookup before it")
    exit_layer: Annotated[int, Field(ge=1, le=1023)] = Field(description="layers that the draft runs")
    exit: AnyExit
    module: ModuleRef = Field(description="the trained adapter")

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        return (self.module,)

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        from skipsearch.errors import ModuleError
        from skipsearch.modules.kangaroo import shallow

        self.mask(model.spec.n_layers)
        found = shallow(model, self.module, folders)
        if found.exit_layer != self.exit_layer:
            raise ModuleError(f"{self.module.file}: this adapter was trained for layer {found.exit_layer}, and the recipe leaves the model "
                              f"at layer {self.exit_layer}")
        return KangarooDrafter(found, self.exit)

    def mask(self, n_layers: int) -> SkipMask:
        """Every layer from the exit on. Raises: MaskError for an exit that the model does not have."""
        return SkipMask.whole_layers(n_layers, range(self.exit_layer, max(n_layers, self.exit_layer + 1)))

    def __str__(self) -> str:
        return f"kangaroo at layer {self.exit_layer}, {self.exit}, up to {self.draft_length}"


class KangarooDrafter:
    def __init__(self, shallow: Shallow, exit_policy: Exit):
        self.shallow, self.exit = shallow, exit_policy
        self._lasting = exit_policy.begin() if exit_policy.shared else None

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return KangarooSession(self.shallow, self._lasting or self.exit.begin(), self.exit.reads_confidence, ctx)


class KangarooSession:
    """One request. Its cache has the K/V of the layers below the exit and of the adapter, in the slots of the tokens; `known`: how many
    tokens of the text are in it. What a round wrote there of accepted tokens stays; the rest is written over."""

    def __init__(self, shallow: Shallow, exit_session: Any, reads_confidence: bool, ctx: DecodeContext):
        self.shallow, self.exit, self.reads_confidence = shallow, exit_session, reads_confidence
        self.cache = shallow.new_cache(ctx.cache.capacity)
        self.known = self._begun = self._drafted = 0

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        import torch

        tokens, probs, start = [], [], len(ctx.history)
        fed = ctx.pending.new_tensor([ctx.history[self.known:]])   # the pending token last; before it whatever came without this drafter
        at = self.known
        for n in range(most):
            plan = ctx.planner.chain(at, fed.shape[1])
            h = self.shallow.adapted(self.shallow.features(fed, self.cache, plan), self.cache, plan)
            scored = ctx.picker.score(self.shallow.head(h[:, -1:])[:, -1], self.reads_confidence)
            at += fed.shape[1]
            fed, q = ctx.picker.draw(scored)
            tokens.append(fed)
            if q is not None:
                probs.append(q)
            if scored.confidence is not None and n + 1 < most and self.exit.stop(float(scored.confidence), n + 1):
                break
        self._begun, self._drafted = start, len(tokens)
        self.known = start   # the text, and behind it all drafted tokens but the last: how many of them stand is told later
        return Draft(torch.cat(tokens)[:, 0], torch.cat(probs) if probs else None)

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.known = self._begun + min(len(path), self._drafted - 1)
        self.exit.observe(len(path), self._drafted)
