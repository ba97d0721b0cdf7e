"""The one layer loop: full pass, draft pass and verify pass are this function with another mask, plan or start layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Scored:
    """What a token is chosen by. weights: [B, 1], the choice itself where it is greedy, else [B, V], what it is to be drawn from.

    sure: [B], the top probability; None if nobody asked for it.
    """

    weights: Tensor
    sure: Tensor | None


class Scorer(Protocol):
    """Scores logits without drawing anything, so that an engine may record it together with the pass.

    key: equal for scorers that do the same.
    """

    @property
    def key(self) -> Hashable: ...

    def score(self, logits: Tensor, sure: bool) -> Scored:
        """logits: [B, V]."""


class PassRunner(Protocol):
    """An engine that may have a whole pass ready."""

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor | None:
        """As `forward`; None leaves the pass to the loop."""

    def run_scored(self, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer, sure: bool) -> Scored | None:
        """As `draft_step`; None leaves it to a pass and the scorer."""


def inference(function: F) -> F:
    """Run without autograd. `inference_mode` would forbid callers to use our tensors in their own graphs; `no_grad` does not."""
    return torch.no_grad()(function)


def forward(model: ModelAdapter, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None,
            last_only: bool = False) -> Tensor:
    """One pass. tokens: [B, T]; returns logits [B, T, V], or [B, 1, V] with last_only (a prefill needs no more).

    mask: sub-layers to leave out (a draft pass); None runs all of them. K/V of every attention that runs are written.
    An engine that has the whole pass ready runs that instead.
    """
    run = getattr(model, "run", None)  # of a PassRunner; isinstance of a protocol costs as much as a kernel
    logits = None if run is None else run(tokens, cache, plan, mask, last_only)
    if logits is not None:
        return logits
    return layers(model, tokens, cache, plan, mask, last_only)


def draft_step(model: ModelAdapter, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer, sure: bool) -> Scored:
    """A draft pass over one token [B, 1] and the scores of the next; with `sure` how certain the draft is of it.

    An engine that has both ready in one piece runs that.
    """
    run = getattr(model, "run_scored", None)
    scored: Scored | None = None if run is None else run(token, cache, plan, mask, scorer, sure)
    return scored if scored is not None else scorer.score(forward(model, token, cache, plan, mask)[:, -1], sure)


def layers(model: ModelAdapter, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None,
           last_only: bool = False) -> Tensor:
    """The loop itself."""
    h = hidden(model, tokens, cache, plan, mask)
    return model.head(h[:, -1:] if last_only else h)


def hidden(model: ModelAdapter, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None) -> Tensor:
    """The loop without the head, which is dear where a vocabulary is large and not all rows of a pass count: [B, T] -> [B, T, H]."""
    return onward(model, model.embed(tokens, plan.positions), 0, cache, plan, mask)


def onward(model: ModelAdapter, h: Tensor, first: int, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None) -> Tensor:
    """The layers from `first` on. h: [B, T, H], as it goes into that layer; returned as it goes into the head."""
    if mask is None:
        for i in range(first, model.spec.n_layers):
            h = model.block(i, h, cache, plan)
    else:
        no_attn, no_mlp = frozenset(mask.attn), frozenset(mask.mlp)
        for i in range(first, model.spec.n_layers):
            attn, mlp = i not in no_attn, i not in no_mlp
            if attn or mlp:
                h = model.block(i, h, cache, plan, attn=attn, mlp=mlp)
    return h
