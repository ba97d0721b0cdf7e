"""How much of decoding is not the model: the loop around its passes, timed by difference."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skipsearch.cache import KVCache, PassPlan
from skipsearch.engine import forward
from skipsearch.evaluation.latency import synchronize
from skipsearch.mask import SkipMask

if TYPE_CHECKING:
    from skipsearch.bench.peers import OurPeer
    from skipsearch.bench.requests import Request


class Timed:
    """A model whose passes behind the prompt are timed."""

    def __init__(self, model: Any, prompt_tokens: int):
        self._model, self._prompt_tokens, self.seconds = model, prompt_tokens, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, tokens: Tensor, cache: KVCache, plan: PassPlan, mask: SkipMask | None, last_only: bool) -> Tensor:
        device = self._model.spec.device
        synchronize(device)
        started = perf_counter()
        logits = forward(self._model, tokens, cache, plan, mask, last_only)
        synchronize(device)
        if plan.start is None or plan.start >= self._prompt_tokens:
            self.seconds += perf_counter() - started
        return logits


def loop_overhead(peer: OurPeer, requests: Sequence[Request]) -> float:
    """1 − seconds of model passes / decode seconds, over these requests."""
    loop = peer.decoder.loop
    real, inside, whole = loop.model, 0.0, 0.0
    try:
        for request in requests:
            timed = Timed(real, len(request.prompt))
            loop.model = timed
            result = peer.decoder.generate(request.prompt, request.new_tokens, ignore_eos=True)
            inside, whole = inside + timed.seconds, whole + result.stats.decode_seconds
    finally:
        loop.model = real
    return max(0.0, 1 - inside / whole)
