"""`skip`: the model drafts for itself with some of its sub-layers left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, field_validator

from skipsearch.drafters.base import DecodeContext, Draft, Drafter, DraftSession, TokenPicker
from skipsearch.exits import Exit, ThresholdSession
from skipsearch.fields import Layers, is_none
from skipsearch.mask import SkipMask, sublayers
from skipsearch.recipe import EXITS, About, DrafterSpec, Siblings, union_of

if TYPE_CHECKING:
    from torch import Tensor

    from skipsearch.models.spec import ModelAdapter

    AnyExit = Exit
else:
    AnyExit = union_of(EXITS)


class Skip(DrafterSpec):
    """Drafts with the model itself, some sub-layers left out, one token a pass, until the exit policy says stop."""

    kind: Literal["skip"] = "skip"
    about = About("Draft & Verify (Zhang et al. 2023)", "a mask, which `tune` searches on calibration prompts",
                  "lookup before it; siblings")
    attn: Layers = Field(description="layers whose attention the draft skips, 0..n_layers-1, ascending")
    mlp: Layers = Field(description="layers whose MLP the draft skips, 0..n_layers-1, ascending")
    exit: AnyExit
    siblings: Siblings | None = Field(default=None, exclude_if=is_none, description="verified beside unsure tokens; left out: none")

    @classmethod
    def of(cls, mask: SkipMask, draft_length: int, exit_policy: Exit, siblings: Siblings | None = None) -> Skip:
        return cls(attn=mask.attn, mlp=mask.mlp, draft_length=draft_length, exit=exit_policy, siblings=siblings)

    @field_validator("attn", "mlp")
    @classmethod
    def _ascending_and_unique(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        return ascending(layers)

    def build(self, model: ModelAdapter, folders: Sequence[Path]) -> Drafter:
        return SkipDrafter(self.mask(model.spec.n_layers), self.exit, self.siblings)

    def mask(self, n_layers: int) -> SkipMask:
        return SkipMask(n_layers, self.attn, self.mlp)

    @property
    def scratch(self) -> int:
        return self.draft_length * self.siblings.most if self.siblings else 0

    def __str__(self) -> str:
        beside = f", {self.siblings}" if self.siblings else ""
        return f"skip {sublayers(len(self.attn) + len(self.mlp))}, {self.exit}, up to {self.draft_length}{beside}"


def ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Raises: ValueError for a layer that is there twice."""
    repeated = [layer for layer in sorted(set(layers)) if layers.count(layer) > 1]
    if repeated:
        raise ValueError(f"layer {repeated[0]} is listed more than once")
    return tuple(sorted(layers))


class SkipDrafter:
    """Source: Draft & Verify, section 3.2; the exit policies are its section 3.4."""

    def __init__(self, mask: SkipMask, exit_policy: Exit, siblings: Siblings | None = None):
        self.skipped, self.exit, self.siblings = mask, exit_policy, siblings
        self._lasting = exit_policy.begin() if exit_policy.shared else None

    def begin(self, ctx: DecodeContext) -> DraftSession:
        return SkipSession(self.skipped, self._lasting or self.exit.begin(), self.exit.reads_confidence, self.siblings)


class Beside(Protocol):
    """Which tokens have siblings, as `Siblings` says it, or another rule. most: of one token."""

    @property
    def most(self) -> int: ...

    def beside(self, confidence: float) -> int:
        """Siblings of a token with this top probability."""


class SkipSession:
    """exit: this request's own, unless the exit policy is shared across requests."""

    def __init__(self, mask: SkipMask, exit_session: Any, reads_confidence: bool, siblings: Beside | None):
        self.skipped, self.exit, self.reads_confidence, self.siblings = mask, exit_session, reads_confidence, siblings
        self._keeps_threshold = isinstance(exit_session, ThresholdSession)
        self._drafted = 0

    def draft(self, ctx: DecodeContext, most: int) -> Draft | None:
        import torch

        from skipsearch.engine import draft_step

        picker = ctx.picker if self.siblings is None else ctx.picker.ranked(1 + self.siblings.most)
        if (draft := self._at_once(ctx, picker, most)) is not None:
            return draft
        reads_confidence = self.reads_confidence or self.siblings is not None
        token, tokens, probs, beside = ctx.pending, list[torch.Tensor](), list[torch.Tensor](), list[int]()
        for n in range(most):
            plan = ctx.planner.chain(ctx.cache.length + n, 1)
            scored = draft_step(ctx.model, token, ctx.cache, plan, self.skipped, picker, reads_confidence)
            drawn, q = picker.draw(scored)   # [1, 1 + siblings]
            token = drawn[:, :1]
            tokens.append(drawn)
            beside.append(0)
            if q is not None:
                probs.append(q)
            if scored.confidence is None:
                continue
            confidence = float(scored.confidence)
            if self.siblings:
                beside[-1] = self.siblings.beside(confidence)
            if n + 1 < most and self.reads_confidence and self.exit.stop(confidence, n + 1):
                break
        self._drafted = len(tokens)
        ranked, ways = torch.cat(tokens), torch.cat(probs) if probs else None
        return with_siblings(ranked, ways, beside) if any(beside) else Draft(ranked[:, 0], ways)

    def _at_once(self, ctx: DecodeContext, picker: TokenPicker, most: int) -> Draft | None:
        """The same draft in one call of the engine; None where it has none, or somebody has to be asked between tokens."""
        from skipsearch.engine import draft_chain

        threshold = self.exit.threshold_now() if self._keeps_threshold else None
        if threshold is None:
            return None
        scored = draft_chain(ctx.model, ctx.pending, ctx.cache, ctx.planner, self.skipped, picker, most, threshold)
        if scored is None:
            return None
        ranked, self._drafted = scored.weights, len(scored.weights)
        if self.siblings is not None and scored.confidence is not None:
            beside = [self.siblings.beside(confidence) for confidence in scored.confidence.tolist()]
            if any(beside):
                return with_siblings(ranked, None, beside)
        return Draft(ranked[:, 0])

    def verified(self, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.exit.observe(sum(node <= self._drafted for node in path), self._drafted)


def with_siblings(ranked: Tensor, probs: Tensor | None, beside: Sequence[int]) -> Draft:
    """A chain whose unsure tokens have siblings. ranked: [N, 1 + siblings], the first column is the chain; probs: [N, V] or None, what each
    row was drawn from without replacement; beside: of each row, how many of its other columns are verified too."""
    import torch

    n, wanted = len(ranked), torch.tensor(beside, device=ranked.device)[:, None]
    columns = torch.arange(1, ranked.shape[1], device=ranked.device)
    rows, chosen = (columns <= wanted).nonzero(as_tuple=True)
    others = ranked[rows, 1 + chosen]
    if probs is not None:   # less could be drawn than was asked for
        possible = probs[rows].gather(1, others[:, None])[:, 0] > 0
        others, rows = others[possible], rows[possible]
    if not len(rows):
        return Draft(ranked[:, 0], probs)
    return Draft(torch.cat([ranked[:, 0], others]), None if probs is None else torch.cat([probs, probs[rows]]),
                 parents=(*range(n), *rows.tolist()), trunk=n)
