"""`kangaroo`: the model's first layers and a trained adapter draft; they stop early in depth, and early in length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession, Resume, WatchingSession
from skipsearch.drafters.skip import AnyExit, with_siblings
from skipsearch.exits import Exit
from skipsearch.fields import ModuleRef, is_none
from skipsearch.mask import SkipMask
from skipsearch.recipe import About, DrafterSpec, Siblings

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.cache import KVCache, PassPlan
    from skipsearch.engine import Tap
    from skipsearch.models.spec import ModelAdapter
    from skipsearch.modules.kangaroo import Shallow


class Kangaroo(DrafterSpec):
    """Double early exiting: each draft pass leaves the model at `exit_layer`, and a round ends where the exit policy says so.

    The paper's settings are an exit after 2 or 3 layers, confidence 0.6, up to 6 tokens; the token that the draft is unsure of is verified
    too. Verification goes on at the exit layer. Where the engine records whole passes (graph) and with exact ones it begins at layer 0: the
    same tokens, a little later. Source: Kangaroo (Liu et al. 2024), section 3.
    """

    kind: Literal["kangaroo"] = "kangaroo"
    about = About("Kangaroo (Liu et al. 2024)", "an adapter that `train kangaroo` makes", "lookup before it; siblings")
    exit_layer: Annotated[int, Field(ge=1, le=1023)] = Field(description="layers that the draft runs")
    exit: AnyExit
    siblings: Siblings | None = Field(default=None, exclude_if=is_none, description="verified beside unsure tokens; left out: none")
    module: ModuleRef = Field(description="the trained adapter")

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        return (self.module,)

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        from skipsearch.engine import in_parts
        from skipsearch.errors import ModuleError
        from skipsearch.modules.kangaroo import shallow

        self.mask(model.spec.n_layers)
        found = shallow(model, self.module, folders)
        if found.exit_layer != self.exit_layer:
            raise ModuleError(f"{self.module.file}: this adapter was trained for layer {found.exit_layer}, and the recipe leaves the model "
                              f"at layer {self.exit_layer}")
        if in_parts(model):
            return ResumingDrafter(found, self.exit, self.siblings)  # type: ignore[return-value]
        return KangarooDrafter(found, self.exit, self.siblings)

    def mask(self, n_layers: int) -> SkipMask:
        """Every layer from the exit on. Raises: MaskError for an exit that the model does not have."""
        return SkipMask.whole_layers(n_layers, range(self.exit_layer, max(n_layers, self.exit_layer + 1)))

    @property
    def scratch(self) -> int:
        return self.draft_length * self.siblings.most if self.siblings else 0

    def __str__(self) -> str:
        beside = f", {self.siblings}" if self.siblings else ""
        return f"kangaroo at layer {self.exit_layer}, {self.exit}, up to {self.draft_length}{beside}"


class _Early:
    def __init__(self, shallow: Shallow, exit_policy: Exit, siblings: Siblings | None = None):
        self.shallow, self.exit, self.siblings = shallow, exit_policy, siblings
        self._lasting = exit_policy.begin() if exit_policy.shared else None

    def exit_session(self) -> Any:
        return self._lasting or self.exit.begin()


class KangarooDrafter(_Early):
    """For engines with whole passes of their own, none of which begins in the middle: its drafts are verified from layer 0 on."""

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return KangarooSession(self, ctx.cache.capacity)


class ResumingDrafter(_Early):
    """Its drafts are verified from the exit layer on: what lies below is the full model's own work already."""

    def watch(self) -> WatchingSession:
        return ResumingSession(self)


class KangarooSession:
    """One request. Its cache has the K/V of the layers below the exit and of the adapter, in the slots of the tokens; `known`: how many
    tokens of the text are in it. What a round wrote there of accepted tokens stays; the rest is written over."""

    cache: KVCache

    def __init__(self, drafter: _Early, capacity: int | None = None):
        self.shallow, self.siblings, self.exit = drafter.shallow, drafter.siblings, drafter.exit_session()
        self.reads_confidence = drafter.exit.reads_confidence
        self.known = self._begun = self._drafted = 0
        if capacity is not None:
            self.cache = self.shallow.new_cache(capacity)

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        import torch

        picker = ctx.picker if self.siblings is None else ctx.picker.ranked(1 + self.siblings.most)
        reads_confidence = self.reads_confidence or self.siblings is not None
        tokens, probs, beside, start = [], [], list[int](), len(ctx.history) - 1
        states = self._behind(ctx)
        reached = [states[:, -1:]]
        for n in range(most):
            rows = states.shape[1]
            logits = self.shallow.logits(states, self.cache, ctx.planner.chain(start + n + 1 - rows, rows))
            scored = picker.score(logits, reads_confidence)
            drawn, q = picker.draw(scored)   # [1, 1 + siblings]
            tokens.append(drawn)
            if q is not None:
                probs.append(q)
            confidence = None if scored.confidence is None else float(scored.confidence)
            beside.append(0 if self.siblings is None or confidence is None else self.siblings.beside(confidence))
            if n + 1 == most or (confidence is not None and self.reads_confidence and self.exit.stop(confidence, n + 1)):
                break
            states = self._features(drawn[:, :1], ctx, start + n + 1)
            reached.append(states)
        self._begun, self._drafted = start, len(tokens)
        self.known = start   # how many of the drafted tokens stand is told later
        ranked, ways = torch.cat(tokens), torch.cat(probs) if probs else None
        found = with_siblings(ranked, ways, beside) if any(beside) else Draft(ranked[:, 0], ways)
        return self._resuming(found, torch.cat(reached, dim=1))

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        stood = sum(node <= self._drafted for node in path)   # siblings are not in the adapter's cache, and nor is the last token
        self.known = self._begun + 1 + min(stood, self._drafted - 1)
        self.exit.observe(stood, self._drafted)

    def _behind(self, ctx: DecodeContext) -> Tensor:
        """[1, R, H]: what goes into the adapter of the pending token, and before it of those that came without this drafter."""
        fed = ctx.pending.new_tensor([ctx.history[self.known:]])
        return self.shallow.features(fed, self.cache, ctx.planner.chain(self.known, fed.shape[1]))

    def _features(self, token: Tensor, ctx: DecodeContext, slot: int) -> Tensor:
        """[1, 1] -> [1, 1, H], its K/V written to a slot."""
        return self.shallow.features(token, self.cache, ctx.planner.chain(slot, 1))

    def _resuming(self, draft: Draft, reached: Tensor) -> Draft:
        return draft


class _Look:
    """Keeps what goes into a layer, [1, rows, H]."""

    def __init__(self, layer: int, rows: int, seen: list[Tensor]):
        self.layers, self.rows, self.seen = (layer,), rows, seen

    def __call__(self, i: int, h: Tensor) -> None:
        if i in self.layers:
            self.seen.append(h[:, :self.rows])


class ResumingSession(KangarooSession):
    """Its cache has the adapter's K/V alone. The layers below the exit write theirs into the model's own cache, behind the committed ones,
    where verification then finds them. What goes into the adapter of tokens that others drafted is seen in the passes that verified them.
    """

    chooses = False

    def __init__(self, drafter: _Early):
        super().__init__(drafter)
        self._seen: list[Tensor] = []     # [1, rows, H] at the exit layer, of the pass that is under way
        self._owed: list[Tensor] = []     # the same of committed tokens that the adapter has not read

    def tap(self, model: ModelAdapter, cache: KVCache, plan: PassPlan, rows: int) -> Tap | None:
        return _Look(self.shallow.exit_layer, rows, self._seen)

    def begin(self, ctx: DecodeContext) -> None:
        import torch

        self.cache = self.shallow.new_cache(ctx.cache.capacity)
        states = torch.cat(self._seen, dim=1)
        before = ctx.prompt - states.shape[1]   # tokens that a session's earlier request left, so that no pass showed them
        if before:
            plan = ctx.planner.chain(0, before)
            earlier = self.shallow.features(ctx.pending.new_tensor([ctx.history[:before]]), self.cache, plan)
            states = torch.cat([earlier, states], dim=1)
        self.shallow.adapted(states, self.cache, ctx.planner.chain(0, ctx.prompt))
        self._seen = []

    def committed(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        import torch

        states = torch.cat(self._seen, dim=1)[:, [0, *path]]
        start = ctx.cache.length - states.shape[1]
        self._owed.append(states[:, max(0, self.known - start):])
        self._seen = []

    def _behind(self, ctx: DecodeContext) -> Tensor:
        import torch

        owed, self._owed = self._owed, []
        return torch.cat([*owed, self._features(ctx.pending, ctx, ctx.cache.length)], dim=1)

    def _features(self, token: Tensor, ctx: DecodeContext, slot: int) -> Tensor:
        return self.shallow.features(token, ctx.cache, ctx.planner.chain(slot, 1))

    def _resuming(self, draft: Draft, reached: Tensor) -> Draft:
        return replace(draft, resume=Resume(reached, self.shallow.exit_layer))
