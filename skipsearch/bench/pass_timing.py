"""Measure how much time decoding spends in draft passes, in full passes and in the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skipsearch.bench.bench_prompts import BenchRequest
from skipsearch.core.machine import synchronize
from skipsearch.core.mask import SkipMask
from skipsearch.engine import DraftScores, draft_chain, draft_step, forward
from skipsearch.models.adapter import LayerRunner, PassRunner
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

if TYPE_CHECKING:
    from skipsearch.bench.systems import SkipsearchSystem


@dataclass
class PassTimes:
    """Seconds and counts of the passes after the prefill. Each pass is synchronised on its own.

    total_s: seconds of the decode loop, including these passes.
    """

    draft_s: float = 0.0
    n_drafts: int = 0
    full_s: float = 0.0
    n_full: int = 0
    total_s: float = 0.0

    @property
    def loop_share(self) -> float:
        """The fraction of the decode time outside model passes."""
        return max(0.0, 1 - (self.draft_s + self.full_s) / self.total_s)

    @property
    def mean_draft_s(self) -> float | None:
        return self.draft_s / self.n_drafts if self.n_drafts else None

    @property
    def mean_full_s(self) -> float:
        return self.full_s / self.n_full


class _TimedModel:
    """A model whose passes after the prompt are timed."""

    def __init__(self, model: Any, prompt_tokens: int, times: PassTimes):
        self._model, self._prompt_tokens, self._times = model, prompt_tokens, times
        self.pass_runner: PassRunner | None = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def run_layers(self) -> LayerRunner | None:
        runner: PassRunner | None = self._model.pass_runner
        return None if runner is None else runner.run_layers

    def run(
        self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool
    ) -> Tensor:
        device, times = self._model.spec.device, self._times
        synchronize(device)
        started = perf_counter()
        logits = forward(self._model, tokens, cache, plan, mask, last_only)
        synchronize(device)
        seconds = perf_counter() - started
        if plan.first_slot is not None and plan.first_slot < self._prompt_tokens:
            return logits
        if mask is None:
            times.full_s, times.n_full = times.full_s + seconds, times.n_full + 1
        else:
            times.draft_s, times.n_drafts = times.draft_s + seconds, times.n_drafts + 1
        return logits

    def run_draft_step(
        self,
        token: Tensor,
        cache: KVCache,
        plan: PassPlan,
        mask: SkipMask,
        scorer: Any,
        with_confidence: bool,
    ) -> DraftScores:
        device, times = self._model.spec.device, self._times
        synchronize(device)
        started = perf_counter()
        scored = draft_step(self._model, token, cache, plan, mask, scorer, with_confidence)
        synchronize(device)
        times.draft_s, times.n_drafts = times.draft_s + perf_counter() - started, times.n_drafts + 1
        return scored

    def run_draft_chain(
        self,
        token: Tensor,
        cache: KVCache,
        planner: Planner,
        mask: SkipMask,
        scorer: Any,
        max_tokens: int,
        threshold: float,
    ) -> DraftScores | None:
        device, times = self._model.spec.device, self._times
        synchronize(device)
        started = perf_counter()
        scored = draft_chain(
            self._model, token, cache, planner, mask, scorer, max_tokens, threshold
        )
        if scored is not None and scored.choice is not None:
            synchronize(device)
            times.draft_s, times.n_drafts = (
                times.draft_s + perf_counter() - started,
                times.n_drafts + len(scored.choice),
            )
        return scored


def time_passes_of(system: SkipsearchSystem, requests: Sequence[BenchRequest]) -> PassTimes:
    """Decode the requests with a timer around each pass, and return the times."""
    loop, times = system.decoder.loop, PassTimes()
    real = loop.model
    try:
        for request in requests:
            loop.model = _TimedModel(real, len(request.prompt_ids), times)
            times.total_s += system.decoder.generate(
                request.prompt_ids, request.new_tokens, ignore_eos=True
            ).stats.decode_seconds
    finally:
        loop.model = real
    return times
