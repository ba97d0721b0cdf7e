"""Search the mask during the decoding of requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skipsearch.core.mask import SkipMask
from skipsearch.drafters.base import DecodeContext
from skipsearch.drafters.dynamic_mask import DynamicMaskDrafter
from skipsearch.drafters.swift.spec import SWIFT
from skipsearch.engine import LayerTap, forward
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan

GP_CANDIDATES = 256  # random masks from which the Gaussian process chooses one
UCB_KAPPA = 2.5  # of the upper confidence bound; the published value
SCORE_NOISE = 1e-2  # variance of one score, as a share of the variance of all scores
MAX_FIT_TRIALS = 200  # trials of a fit (the latest): the cost of a fit grows with their cube
Point = tuple[float, ...]  # input of the Gaussian process for a mask: a number per sub-layer


@dataclass
class SearchState:
    """The state of the mask search, which covers all requests of a decoder."""

    mask: SkipMask  # the current mask
    n_correct: int = 0  # tokens that the current mask predicted correctly
    n_judged: int = 0  # tokens on which the current mask was tried
    n_trials: int = 0
    stale_trials: int = 0  # trials since the latest improvement
    n_rounds: int = 0
    results: list[tuple[Point, float]] = field(default_factory=list)  # (point, score) of each trial

    @property
    def score(self) -> float:
        return self.n_correct / self.n_judged if self.n_judged else 0.0


class SWIFTDrafter(DynamicMaskDrafter):
    """A skip drafter that searches its mask. All requests share the search.

    Code that changes `search` must hold `lock`, and must neither run a pass of a model nor fit a
    Gaussian process while it does.
    """

    def __init__(self, spec: SWIFT, model: ModelAdapter):
        super().__init__(lambda: SWIFTPolicy(self), spec.exit, spec.tree)
        self.spec, self.model, self.lock = spec, model, threading.Lock()
        n = model.spec.n_layers
        self.skippable = list(range(2, 2 * n - 2))  # without the first and the last layer
        self.n_skipped = int(len(self.skippable) * spec.skip_ratio)
        if spec.warm is None:
            # The published initial mask: layers 1, 3, 5, …, their MLPs first.
            odd = [s for s in self.skippable if s // 2 % 2]
            sublayers = sorted(odd, key=lambda s: (-s % 2, s))[: self.n_skipped]
            mask = SkipMask.from_sublayers(n, sublayers)
        else:
            mask = SkipMask(n, spec.warm.attn, spec.warm.mlp)
        self.search = SearchState(mask)
        self._random = random.Random(spec.seed)

    @property
    def is_learning(self) -> bool:
        spec, search = self.spec, self.search
        return (
            bool(self.n_skipped)
            and search.n_trials < spec.most_trials
            and search.stale_trials < spec.tolerance
            and search.score <= spec.max_score
        )

    def propose_mask(self) -> tuple[SkipMask, Point]:
        """Return (mask to try, its point).

        A point has one number for each sub-layer, from which the Gaussian process learns. The
        process proposes every `bayes_interval`-th mask; the others are random.
        """
        with self.lock:
            search = self.search
            if (search.n_trials + 1) % self.spec.bayes_interval or len(search.results) < 2:
                return self._random_mask()
            candidates = [
                self._random_point() if self.spec.faithful else self._random_mask()
                for _ in range(GP_CANDIDATES)
            ]
            points, scores = zip(*search.results[-MAX_FIT_TRIALS:], strict=True)
        from botorch.models import SingleTaskGP  # the import takes seconds

        targets = torch.tensor(scores, dtype=torch.double)[:, None]
        if targets.std() == 0:  # equal scores: nothing to fit
            return candidates[0]
        targets = (targets - targets.mean()) / targets.std()
        process = SingleTaskGP(  # draws no random numbers
            torch.tensor(points, dtype=torch.double),
            targets,
            torch.full_like(targets, SCORE_NOISE),
            outcome_transform=None,
        )
        posterior = process.posterior(
            torch.tensor([point for _, point in candidates], dtype=torch.double)
        )
        bound = posterior.mean + UCB_KAPPA * posterior.variance.sqrt()
        return candidates[int(bound.argmax())]

    def _random_mask(self) -> tuple[SkipMask, Point]:
        mask = SkipMask.from_sublayers(
            self.model.spec.n_layers, self._random.sample(self.skippable, self.n_skipped)
        )
        return mask, mask.bits

    def _random_point(self) -> tuple[SkipMask, Point]:
        """Return (mask, random point). The mask skips the point's highest coordinates."""
        n = self.model.spec.n_layers
        point = tuple(self._random.random() if s in self.skippable else 0.0 for s in range(2 * n))
        highest = sorted(self.skippable, key=lambda s: -point[s])[: self.n_skipped]
        return SkipMask.from_sublayers(n, highest), point


class SWIFTPolicy:
    """The mask policy of one request. Its rounds advance the search of the drafter."""

    def __init__(self, drafter: SWIFTDrafter):
        self.drafter = drafter

    def tap(
        self, model: ModelAdapter, cache: KVCache, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        return None

    def initial_mask(self, ctx: DecodeContext) -> SkipMask:
        return self.drafter.search.mask

    def next_mask(self, ctx: DecodeContext, accepted_nodes: Sequence[int]) -> SkipMask | None:
        drafter, spec = self.drafter, self.drafter.spec
        n_generated = len(ctx.history) - ctx.prompt_length  # before this round
        with drafter.lock:
            drafter.search.n_rounds += 1
            is_due = (
                drafter.is_learning
                and n_generated > spec.window + 1
                and drafter.search.n_rounds % spec.interval == 0
            )
        if is_due:
            self._run_trial(ctx)
        return drafter.search.mask

    def _run_trial(self, ctx: DecodeContext) -> None:
        """Try a mask, and compare it with the current one.

        Passes run without the lock. If another request replaces the current mask meanwhile, the
        counts of the old mask are dropped.
        """
        drafter, search = self.drafter, self.drafter.search
        faithful, window = drafter.spec.faithful, drafter.spec.window
        count_correct = self._score_first if faithful else self._score_recent
        current = search.mask
        if not search.n_judged and not faithful:
            n_correct = count_correct(ctx, current)
            with drafter.lock:
                if search.mask is current and not search.n_judged:
                    search.n_correct, search.n_judged = n_correct, window
        mask, point = drafter.propose_mask()
        n_correct = count_correct(ctx, mask)
        with drafter.lock:
            search.n_trials += 1
            search.results.append((point, n_correct / window))
            current = search.mask
            is_ahead = n_correct / window > search.score  # the current mask's average
        # Also compare both masks on the same tokens.
        recheck = is_ahead and not faithful
        current_correct = count_correct(ctx, current) if recheck else 0
        with drafter.lock:
            if is_ahead and n_correct > current_correct and search.mask is current:
                search.mask, search.stale_trials = mask, 0
                search.n_correct, search.n_judged = n_correct, window
                return
            search.stale_trials += 1
            if recheck and search.mask is current:
                search.n_correct += current_correct
                search.n_judged += window

    def _score_recent(self, ctx: DecodeContext, mask: SkipMask) -> int:
        """Count how many of the latest tokens a draft pass under the mask predicts.

        One pass predicts all of them, each from the full model's K/V of the tokens before it.
        """
        window = self.drafter.spec.window
        last = len(ctx.history) - 1  # the last token has no next token to predict
        anchors = torch.arange(last - window, last)
        return self._score(ctx, mask, last - window, anchors, torch.arange(window))

    def _score_first(self, ctx: DecodeContext, mask: SkipMask) -> int:
        """Count how many of the first generated tokens a draft pass under the mask predicts.

        The pass reads all of them after the prompt's K/V.
        """
        window, start = self.drafter.spec.window, ctx.prompt_length
        anchors = torch.full((window,), start)
        return self._score(ctx, mask, start, anchors, torch.zeros(window, dtype=torch.long))

    def _score(
        self, ctx: DecodeContext, mask: SkipMask, start: int, anchors: Tensor, groups: Tensor
    ) -> int:
        """Count the correct predictions at the `window` positions from `start` on.

        anchors, groups: as for `Planner.plan_replay`, [window].
        """
        window, device = self.drafter.spec.window, self.drafter.model.spec.device
        tokens = torch.tensor([ctx.history[start : start + window + 1]], device=device)
        positions = torch.arange(start, start + window, device=device)[None]
        plan = ctx.planner.plan_replay(
            ctx.cache.length, positions, anchors.to(device)[None], groups.to(device)
        )
        logits = forward(self.drafter.model, tokens[:, :-1], ctx.cache, plan, mask)
        return int((logits.argmax(dim=-1) == tokens[:, 1:]).sum())
