"""The one layer loop: full pass, draft pass and verify pass are `onward` with another mask, plan or start layer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine.rows import RowCache
from skipsearch.errors import ModelError
from skipsearch.mask import SkipMask
from skipsearch.models.spec import LayerRunner, ModelAdapter, Scored, Scorer

F = TypeVar("F", bound=Callable[..., Any])
Between = Callable[[Tensor], None]
Tap = Callable[[int, Tensor], Between | None]


def inference(function: F) -> F:
    """Run without autograd. `inference_mode` would forbid callers to use our tensors in their own graphs; `no_grad` does not."""
    return torch.no_grad()(function)


def forward(model: ModelAdapter, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None,
            last_only: bool = False, tap: Tap | None = None) -> Tensor:
    """One pass. tokens: [B, T]; returns logits [B, T, V], or [B, 1, V] with last_only (a prefill needs no more).

    mask: sub-layers to leave out (a draft pass); None runs all of them. K/V of every attention that runs are written.
    An engine that has the whole pass ready runs that instead, and a pass over a row of a shared cache may run together with those of other
    rows, unless somebody wants to see its hidden states. tap: as in `onward`.
    """
    if tap is None and isinstance(cache, RowCache) and cache.joins(plan, last_only):
        return cache.join(model, tokens, cache, plan, mask)
    return alone(model, tokens, cache, plan, mask, last_only, tap)


def alone(model: ModelAdapter, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None,
          last_only: bool = False, tap: Tap | None = None) -> Tensor:
    """`forward` without asking whether others join."""
    if tap is None and model.passes is not None and (logits := model.passes.run(tokens, cache, plan, mask, last_only)) is not None:
        return logits
    return looped(model, tokens, cache, plan, mask, last_only, tap)


def resumed(model: ModelAdapter, hidden: Tensor, first: int, rest: Tensor, cache: KVCache, plan: PassPlan,
            tap: Tap | None = None) -> Tensor:
    """`forward` where some rows have been through the layers below `first` already, and their K/V of these layers are in their slots.

    hidden: [B, R, H], what goes into layer `first` at the first R rows of the plan; rest: [B, T − R], the tokens of the other rows, which
    go through all layers. Returns logits [B, T, V]. tap: as in `onward`, from layer `first` on.
    """
    below = states_at(model, first, rest, cache, plan.behind(hidden.shape[1]))
    return headed(model, torch.cat([hidden, below], dim=1), cache, plan, first=first, tap=tap)


def states_at(model: ModelAdapter, layer: int, tokens: Tensor, cache: KVCache, plan: PassPlan) -> Tensor:
    """What goes into a layer, [B, T] -> [B, T, H]; K/V of the layers below it are written."""
    n, run = model.spec.n_layers, in_one_piece(model)
    if run is not None:
        return run(tokens, cache, plan, None, 0, layer)
    return onward(model, model.embed(tokens, plan.positions), cache, plan, SkipMask.whole_layers(n, range(layer, n)))


def draft_step(model: ModelAdapter, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer,
               confidence: bool) -> Scored:
    """A draft pass over one token [B, 1] and the scores of the next; with `confidence` the top probability too.

    An engine that has both ready in one piece runs that.
    """
    if isinstance(cache, RowCache) and cache.joins(plan, last_only=False):
        return cache.join(model, token, cache, plan, mask, scorer, confidence)
    return step_alone(model, token, cache, plan, mask, scorer, confidence)


def step_alone(model: ModelAdapter, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Scorer,
               confidence: bool) -> Scored:
    """`draft_step` without asking whether others join."""
    if model.passes is not None and (scored := model.passes.run_scored(token, cache, plan, mask, scorer, confidence)) is not None:
        return scored
    return scorer.score(alone(model, token, cache, plan, mask)[:, -1], confidence)


def draft_chain(model: ModelAdapter, token: Tensor, cache: KVCache, planner: Planner, mask: SkipMask, scorer: Scorer, most: int,
                threshold: float) -> Scored | None:
    """Draft steps one after another, each with the token that the one before scored highest, in one call of the engine.

    token: [1, 1], to be written behind the cache. They end behind the first token whose top probability is under the threshold, or at
    `most`. Returns the scores of N steps: weights [N, choices], the choice first, and confidence [N]. None: the engine has no such call
    for them, or each step may join those of other requests.
    """
    if model.passes is None or isinstance(cache, RowCache):
        return None
    return model.passes.run_draft(token, cache, planner, mask, scorer, most, threshold)


def looped(model: ModelAdapter, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None,
           last_only: bool = False, tap: Tap | None = None) -> Tensor:
    """`forward` layer by layer, which is what an engine with whole passes makes them of.

    Raises: ModelError for a model with recurrent layers, whose layer loop leaves their states where they are.
    """
    if model.spec.recurrent:
        raise ModelError(f"the layers of {model.spec.id} keep a recurrent state, and only whole passes move it on: draft with skip or "
                         "lookup")
    return headed(model, tokens, cache, plan, mask, last_only=last_only, tap=tap)


def headed(model: ModelAdapter, given: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None, first: int = 0,
           last_only: bool = False, tap: Tap | None = None) -> Tensor:
    """`onward`, and the head behind it. given: what goes into layer `first`, or tokens [B, T] where that is layer 0."""
    run, wanted = in_one_piece(model), _wanted(tap)
    if run is not None and wanted is not None and not {0, model.spec.n_layers} & set(wanted):
        return _in_pieces(run, model.spec.n_layers, given, cache, plan, mask, first, tap, wanted, True, last_only)
    h = given if given.is_floating_point() else model.embed(given, plan.positions)
    h = onward(model, h, cache, plan, mask, first, tap)
    return model.head(h[:, -1:] if last_only else h)


def in_parts(model: ModelAdapter) -> bool:
    """Whether a pass may begin and end at any layer without losing what the engine has ready of whole ones."""
    return model.passes is None or model.passes.run_layers is not None


def in_one_piece(model: ModelAdapter) -> LayerRunner | None:
    """What runs several layers as one; None: they go one by one."""
    return None if model.passes is None else model.passes.run_layers


def _wanted(tap: Tap | None) -> Collection[int] | None:
    """Layers whose input a tap is shown; None: all, and what lies between attention and MLP too."""
    return () if tap is None else getattr(tap, "layers", None)


def _in_pieces(run: LayerRunner, n: int, h: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, first: int, tap: Tap | None,
               wanted: Collection[int], logits: bool = False, last_only: bool = False) -> Tensor:
    """From one of the layers that are shown to the next, and from the last of them to the end. n: the model's layers."""
    for i, j in pairwise(sorted({first, n, *(at for at in wanted if first < at < n)})):
        if tap is not None and i in wanted:
            tap(i, h)
        h = run(h, cache, plan, mask, i, j, logits and j == n, last_only and j == n)
    if tap is not None and n in wanted:
        tap(n, h)
    return h


def onward(model: ModelAdapter, h: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None = None, first: int = 0,
           tap: Tap | None = None) -> Tensor:
    """The layers from `first` on. h: [B, T, H], as it goes into that layer; returned as it goes into the head.

    tap(i, h): shown what goes into each layer i that is walked over, and last what goes into the head, i being the number of layers. It may
    return what is to be shown the state between attention and MLP of layer i, where the MLP reads that: the two are run one by one then.
    A tap that names what it wants to see in `layers`, and nothing between, is shown that alone; an engine that runs several layers in one
    piece then does so from one of them to the next.
    """
    n, wanted = model.spec.n_layers, _wanted(tap)
    if wanted is not None and (run := in_one_piece(model)) is not None:
        return _in_pieces(run, n, h, cache, plan, mask, first, tap, wanted)
    no_attn, no_mlp = (frozenset(mask.attn), frozenset(mask.mlp)) if mask is not None else (frozenset[int](), frozenset[int]())
    for i in range(first, n):
        attn, mlp = i not in no_attn, i not in no_mlp
        if tap is not None and (wanted is None or i in wanted) and (between := tap(i, h)) is not None and attn:
            h, attn = model.block(i, h, cache, plan, attn=True, mlp=False), False
            between(h)
        if attn or mlp:
            h = model.block(i, h, cache, plan, attn=attn, mlp=mlp)
    if tap is not None and (wanted is None or n in wanted):
        tap(n, h)
    return h
