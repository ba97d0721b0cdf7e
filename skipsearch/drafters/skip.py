"""`skip`: the model drafts for itself with some of its sub-layers left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession
from skipsearch.exits import Exit
from skipsearch.fields import Layers
from skipsearch.mask import SkipMask
from skipsearch.recipe import EXITS, DrafterSpec, union_of

if TYPE_CHECKING:
    from skipsearch.models.spec import ModelAdapter

    AnyExit = Exit
else:
    AnyExit = union_of(EXITS)


class Skip(DrafterSpec):
    """Drafts with the model itself, some sub-layers left out, one token a pass, until the exit policy says stop."""

    kind: Literal["skip"] = "skip"
    attn: Layers = Field(description="layers whose attention the draft skips, 0..n_layers-1, ascending")
    mlp: Layers = Field(description="layers whose MLP the draft skips, 0..n_layers-1, ascending")
    exit: AnyExit

    @classmethod
    def of(cls, mask: SkipMask, draft_length: int, exit_policy: Exit) -> Skip:
        return cls(attn=mask.attn, mlp=mask.mlp, draft_length=draft_length, exit=exit_policy)

    @field_validator("attn", "mlp")
    @classmethod
    def _ascending_and_unique(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        repeated = [layer for layer in sorted(set(layers)) if layers.count(layer) > 1]
        if repeated:
            raise ValueError(f"layer {repeated[0]} is listed more than once")
        return tuple(sorted(layers))

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        return SkipDrafter(self.mask(model.spec.n_layers), self.exit)

    def mask(self, n_layers: int) -> SkipMask:
        return SkipMask(n_layers, self.attn, self.mlp)

    def __str__(self) -> str:
        return f"skip {len(self.attn) + len(self.mlp)} sub-layers, {self.exit}, up to {self.draft_length}"


class SkipDrafter:
    """Source: Draft & Verify, section 3.2; the exit policies are its section 3.4."""

    def __init__(self, mask: SkipMask, exit_policy: Exit):
        self.skipped, self.exit = mask, exit_policy
        self._lasting = exit_policy.begin() if exit_policy.shared else None

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return SkipSession(self.skipped, self._lasting or self.exit.begin(), self.exit.reads_confidence)


class SkipSession:
    """exit: this request's own, unless the exit policy is shared across requests."""

    def __init__(self, mask: SkipMask, exit_session: Any, reads_confidence: bool):
        self.skipped, self.exit, self.reads_confidence = mask, exit_session, reads_confidence
        self._drafted = 0

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        import torch

        from skipsearch.engine import draft_step

        token, tokens, probs = ctx.pending, [], []
        for n in range(most):
            plan = ctx.planner.chain(ctx.cache.length + n, 1)
            scored = draft_step(ctx.model, token, ctx.cache, plan, self.skipped, ctx.picker, self.reads_confidence)
            token, q = ctx.picker.draw(scored)
            tokens.append(token)
            if q is not None:
                probs.append(q)
            if scored.confidence is not None and n + 1 < most and self.exit.stop(float(scored.confidence), n + 1):
                break
        self._drafted = len(tokens)
        return Draft(torch.cat(tokens)[:, 0], torch.cat(probs) if probs else None)

    def verified(self, ctx: DecodeContext, accepted: int) -> None:
        self.exit.observe(accepted, self._drafted)
