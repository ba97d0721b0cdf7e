"""Where decoding spends its time: draft passes, passes of the full model, and the loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skipsearch.bench.requests import Request
from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.engine import Scored, draft_chain, draft_step, forward
from skipsearch.machine import synchronise
from skipsearch.mask import SkipMask
from skipsearch.models.spec import LayerRunner, PassRunner

if TYPE_CHECKING:
    from skipsearch.bench.peers import OurPeer


@dataclass
class PassTimes:
    """Seconds and counts behind the prompts, each pass synchronised on its own; whole: of the decode loop around them."""

    draft: float = 0.0
    drafts: int = 0
    full: float = 0.0
    fulls: int = 0
    whole: float = 0.0

    @property
    def loop_share(self) -> float:
        """Of the decode time, what is outside model passes."""
        return max(0.0, 1 - (self.draft + self.full) / self.whole)

    @property
    def a_draft(self) -> float | None:
        return self.draft / self.drafts if self.drafts else None

    @property
    def a_full(self) -> float:
        return self.full / self.fulls


class _Timed:
    """A model whose passes behind the prompt are timed."""

    def __init__(self, model: Any, prompt_tokens: int, times: PassTimes):
        self._model, self._prompt_tokens, self._times = model, prompt_tokens, times
        self.passes: PassRunner | None = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def run_layers(self) -> LayerRunner | None:
        runner: PassRunner | None = self._model.passes
        return None if runner is None else runner.run_layers

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor:
        device, times = self._model.spec.device, self._times
        synchronise(device)
        started = perf_counter()
        logits = forward(self._model, tokens, cache, plan, mask, last_only)
        synchronise(device)
        seconds = perf_counter() - started
        if plan.start is not None and plan.start < self._prompt_tokens:
            return logits
        if mask is None:
            times.full, times.fulls = times.full + seconds, times.fulls + 1
        else:
            times.draft, times.drafts = times.draft + seconds, times.drafts + 1
        return logits

    def run_scored(self, token: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask, scorer: Any, confidence: bool) -> Scored:
        device, times = self._model.spec.device, self._times
        synchronise(device)
        started = perf_counter()
        scored = draft_step(self._model, token, cache, plan, mask, scorer, confidence)
        synchronise(device)
        times.draft, times.drafts = times.draft + perf_counter() - started, times.drafts + 1
        return scored

    def run_draft(self, token: Tensor, cache: KVCache, planner: Planner, mask: SkipMask, scorer: Any, most: int,
                  threshold: float) -> Scored | None:
        device, times = self._model.spec.device, self._times
        synchronise(device)
        started = perf_counter()
        scored = draft_chain(self._model, token, cache, planner, mask, scorer, most, threshold)
        if scored is not None:
            synchronise(device)
            times.draft, times.drafts = times.draft + perf_counter() - started, times.drafts + len(scored.weights)
        return scored


def pass_times(peer: OurPeer, requests: Sequence[Request]) -> PassTimes:
    """Of one more run of these requests."""
    loop, times = peer.decoder.loop, PassTimes()
    real = loop.model
    try:
        for request in requests:
            loop.model = _Timed(real, len(request.prompt), times)
            times.whole += peer.decoder.generate(request.prompt, request.new_tokens, ignore_eos=True).stats.decode_seconds
    finally:
        loop.model = real
    return times
