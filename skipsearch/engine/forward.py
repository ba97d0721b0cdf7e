"""Run a pass. Full, draft and verify passes are calls of `forward` with their mask and plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.engine.shared_cache import RowCache
from skipsearch.errors import ModelError
from skipsearch.models.adapter import (
    DraftScorer,
    DraftScores,
    HiddenRunner,
    LayerRunner,
    ModelAdapter,
)
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

F = TypeVar("F", bound=Callable[..., Any])
MidLayerTap = Callable[[Tensor], None]  # observes the state between attention and MLP
LayerTap = Callable[[int, Tensor], MidLayerTap | None]  # observes the input of a layer


class LayerInputTap:
    """A tap that captures the input of one layer, [1, rows, H]. Layer n_layers: of the head."""

    def __init__(self, layer: int, n_rows: int, captured: list[Tensor]):
        self.layers, self.n_rows, self.captured = (layer,), n_rows, captured

    def __call__(self, layer: int, hidden: Tensor) -> None:
        if layer in self.layers:
            self.captured.append(hidden[:, : self.n_rows])


def no_grad(function: F) -> F:
    """Decorate a function to run without autograd.

    Callers may use the resulting tensors in graphs of their own, which `inference_mode` would
    forbid.
    """
    return torch.no_grad()(function)


def forward(
    model: ModelAdapter,
    tokens: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask | None = None,
    last_only: bool = False,
    tap: LayerTap | None = None,
) -> Tensor:
    """Run one pass over tokens [B, T]; return logits [B, T, V], or [B, 1, V] with last_only.

    The K/V of every attention block that runs are written. If `cache` is one request's part of a
    shared cache, the pass may be merged with those of other requests. A pass with a tap is never
    merged.

    mask: sub-layers to leave out (a draft pass); None runs all of them.
    last_only: run the head for the last token alone, as a prefill needs no other logits.
    tap: observes hidden states, as in `run_layers`.
    """
    if tap is None and _joins(cache, plan, last_only):
        return cache.submit(model, tokens, cache, plan, mask)
    return run_pass(model, tokens, cache, plan, mask, last_only, tap)


def _joins(cache: KVCache, plan: PassPlan, last_only: bool) -> TypeGuard[RowCache]:
    """Return whether a pass may be merged with those of other requests.

    Also grows the cache: a request that becomes too long leaves the shared cache, and cannot join.
    """
    if not isinstance(cache, RowCache):
        return False
    cache.reserve(plan.n_keys)
    return cache.can_join(plan, last_only)


def run_pass(
    model: ModelAdapter,
    tokens: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask | None = None,
    last_only: bool = False,
    tap: LayerTap | None = None,
) -> Tensor:
    """Run `forward` for this request alone: in one call of the engine, or layer by layer."""
    if (
        tap is None
        and model.pass_runner is not None
        and (logits := model.pass_runner.run(tokens, cache, plan, mask, last_only)) is not None
    ):
        return logits
    return run_layer_loop(model, tokens, cache, plan, mask, last_only, tap)


def resume_pass(
    model: ModelAdapter,
    hidden: Tensor,
    next_layer: int,
    remaining_tokens: Tensor,
    cache: KVCache,
    plan: PassPlan,
    tap: LayerTap | None = None,
) -> Tensor:
    """Run a verify pass whose first R rows have already run through the layers below `next_layer`.

    The K/V of these rows in the lower layers must be in their slots.

    hidden: [B, R, H], input of layer `next_layer` for the first R rows of the plan.
    remaining_tokens: [B, T − R], tokens of the other rows, which go through all layers.
    tap: as in `run_layers`, from layer `next_layer` on.
    Returns: logits [B, T, V].
    """
    remaining_hidden = run_up_to_layer(
        model, next_layer, remaining_tokens, cache, plan.without_first(hidden.shape[1])
    )
    return run_layer_loop(
        model,
        torch.cat([hidden, remaining_hidden], dim=1),
        cache,
        plan,
        tap=tap,
        first_layer=next_layer,
    )


def run_up_to_layer(
    model: ModelAdapter, layer: int, tokens: Tensor, cache: KVCache, plan: PassPlan
) -> Tensor:
    """Run the layers below `layer`, and write their K/V; return the layer's input, [B, T, H]."""
    n_layers, run = model.spec.n_layers, get_layer_runner(model)
    if run is not None:
        return run(tokens, cache, plan, None, 0, layer)
    return run_layers(
        model,
        model.embed(tokens, plan.positions),
        cache,
        plan,
        SkipMask.from_layers(n_layers, range(layer, n_layers)),
    )


def draft_step(
    model: ModelAdapter,
    token: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask,
    scorer: DraftScorer,
    with_confidence: bool,
) -> DraftScores:
    """Run a draft pass over one token per text, [B, 1]; return the scores of the next token.

    with_confidence: the scores include the top probability.
    """
    if _joins(cache, plan, last_only=False):
        return cache.submit(model, token, cache, plan, mask, scorer, with_confidence)
    return run_draft_step(model, token, cache, plan, mask, scorer, with_confidence)


def run_draft_step(
    model: ModelAdapter,
    token: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask,
    scorer: DraftScorer,
    with_confidence: bool,
) -> DraftScores:
    """Run `draft_step` for this request alone, in one call of the engine if it has one."""
    if (
        model.pass_runner is not None
        and (
            scores := model.pass_runner.run_draft_step(
                token, cache, plan, mask, scorer, with_confidence
            )
        )
        is not None
    ):
        return scores
    return scorer.score(run_pass(model, token, cache, plan, mask)[:, -1], with_confidence)


def draft_chain(
    model: ModelAdapter,
    tokens: Tensor,
    cache: KVCache,
    planner: Planner,
    mask: SkipMask,
    scorer: DraftScorer,
    max_tokens: int,
    threshold: float,
) -> DraftScores | None:
    """Run several draft steps in one call of the engine.

    Each step reads the token of the step before: the one with the highest score, or, if the scorer
    has `draw_settings`, one that the engine draws.

    tokens: [1, T], written to the first slots after the committed ones. The first step reads them
    all.
    max_tokens: the most steps.
    threshold: the steps end after the first one whose top probability is below it.
    Returns: scores of N steps: choice [N, n], with the chosen token first, confidence [N], and the
    distributions probs [N, V] of drawn tokens. None if the engine has no such call, or if each step
    may be merged with steps of other requests.
    """
    if model.pass_runner is None or (isinstance(cache, RowCache) and not cache.alone):
        return None
    return model.pass_runner.run_draft_chain(
        tokens, cache, planner, mask, scorer, max_tokens, threshold
    )


def run_layer_loop(
    model: ModelAdapter,
    tokens_or_hidden: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask | None = None,
    last_only: bool = False,
    tap: LayerTap | None = None,
    first_layer: int = 0,
) -> Tensor:
    """Run a pass layer by layer from `first_layer` on, then the head.

    tokens_or_hidden: the input of layer `first_layer`: tokens [B, T] for layer 0, else hidden
    states [B, T, H].
    Returns: logits [B, T, V], or [B, 1, V] with last_only.
    Raises: ModelError for a model with recurrent layers, because a layer loop does not advance
    their states. A tap of the head's input alone is possible.
    """
    n_layers = model.spec.n_layers
    if model.spec.is_recurrent:
        taps_head_alone = set(_tapped_layers(tap) or ()) == {n_layers}
        is_whole_pass = taps_head_alone and first_layer == 0
        if tap is not None and is_whole_pass and isinstance(model, HiddenRunner):
            logits, hidden = model.run_with_hidden(tokens_or_hidden, cache, plan, mask, last_only)
            tap(n_layers, hidden)
            return logits
        raise ModelError(
            f"the layers of {model.spec.id} keep a recurrent state, and only whole passes "
            "advance it: draft with skip or lookup"
        )
    run, tapped = get_layer_runner(model), _tapped_layers(tap)
    if run is not None and tapped is not None and not {0, n_layers} & set(tapped):
        return _run_between_taps(
            run,
            n_layers,
            tokens_or_hidden,
            cache,
            plan,
            mask,
            first_layer,
            tap,
            tapped,
            with_head=True,
            last_only=last_only,
        )
    hidden = tokens_or_hidden
    if not hidden.is_floating_point():
        hidden = model.embed(hidden, plan.positions)
    hidden = run_layers(model, hidden, cache, plan, mask, first_layer, tap)
    return model.head(hidden[:, -1:] if last_only else hidden)


def can_start_midway(model: ModelAdapter) -> bool:
    """Return whether the engine can begin and end a pass at any layer."""
    return model.pass_runner is None or model.pass_runner.run_layers is not None


def get_layer_runner(model: ModelAdapter) -> LayerRunner | None:
    """Return the engine's function that runs several layers; None if layers run one by one."""
    return None if model.pass_runner is None else model.pass_runner.run_layers


def _tapped_layers(tap: LayerTap | None) -> Collection[int] | None:
    """Return the layers whose input a tap observes; None: all, also between attention and MLP."""
    return () if tap is None else getattr(tap, "layers", None)


def _run_between_taps(
    run: LayerRunner,
    n_layers: int,
    hidden: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask | None,
    first_layer: int,
    tap: LayerTap | None,
    tapped_layers: Collection[int],
    with_head: bool = False,
    last_only: bool = False,
) -> Tensor:
    """Run the layers with one call of the engine from each tapped layer to the next.

    n_layers: layers of the model.
    """
    for begin, end in pairwise(
        sorted(
            {
                first_layer,
                n_layers,
                *(layer for layer in tapped_layers if first_layer < layer < n_layers),
            }
        )
    ):
        if tap is not None and begin in tapped_layers:
            tap(begin, hidden)
        hidden = run(
            hidden,
            cache,
            plan,
            mask,
            begin,
            end,
            with_head and end == n_layers,
            last_only and end == n_layers,
        )
    if tap is not None and n_layers in tapped_layers:
        tap(n_layers, hidden)
    return hidden


def run_layers(
    model: ModelAdapter,
    hidden: Tensor,
    cache: KVCache,
    plan: PassPlan,
    mask: SkipMask | None = None,
    first_layer: int = 0,
    tap: LayerTap | None = None,
) -> Tensor:
    """Run the layers from `first_layer` on, [B, T, H] -> [B, T, H]; return the input of the head.

    tap(i, h) is called with the input of each layer i, and at the end with i = n_layers and the
    input of the head. If it returns a function and layer i runs both attention and MLP, the
    function is called with the state between them. A tap with an attribute `layers` is called for
    these layers alone and returns nothing; the engine runs the layers between them in one call.
    """
    n_layers, tapped = model.spec.n_layers, _tapped_layers(tap)
    if tapped is not None and (run := get_layer_runner(model)) is not None:
        return _run_between_taps(run, n_layers, hidden, cache, plan, mask, first_layer, tap, tapped)
    skipped_attn, skipped_mlp = (
        (frozenset(mask.attn) - model.spec.lending_layers, frozenset(mask.mlp))
        if mask is not None
        else (frozenset[int](), frozenset[int]())
    )
    for i in range(first_layer, n_layers):
        attn, mlp = i not in skipped_attn, i not in skipped_mlp
        if (
            tap is not None
            and (tapped is None or i in tapped)
            and (mid_layer_tap := tap(i, hidden)) is not None
            and attn
        ):
            hidden, attn = model.block(i, hidden, cache, plan, attn=True, mlp=False), False
            mid_layer_tap(hidden)
        if attn or mlp:
            hidden = model.block(i, hidden, cache, plan, attn=attn, mlp=mlp)
    if tap is not None and (tapped is None or n_layers in tapped):
        tap(n_layers, hidden)
    return hidden
