"""Fast replay: how a mask's draft would fare on the full model's own text, from one parallel forward a prompt.

The full model's greedy continuation is generated once and its K/V stay in the cache. A mask is then judged by ONE pass over all generated
positions: each query sees the full model's K/V at earlier positions and its own draft K/V at its own. That is exact for the first
token of a round; for later ones it takes the full model's K/V where the real draft has its own.
The pass plan says it all: the queries' own K/V go to spare slots behind the text, and each query is shown one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.decoding import Decoder
from skipsearch.engine import forward, inference
from skipsearch.errors import SearchError
from skipsearch.mask import SkipMask
from skipsearch.models.spec import ModelAdapter


@dataclass(frozen=True)
class Replayed:
    """A mask on one prompt. agrees [G − 1]: the draft names the token that the full model emits next; confidence [G − 1]: its top
    probability. Entry j belongs to the draft pass that is fed generated token j and proposes token j + 1. room: tokens that were
    allowed behind the first generated one, of which the text may have used fewer."""

    agrees: np.ndarray
    confidence: np.ndarray
    room: int


@dataclass(frozen=True)
class _Continuation:
    fed: Tensor       # [1, G − 1] generated tokens 0 … G − 2
    following: Tensor  # [1, G − 1] generated tokens 1 … G − 1
    cache: KVCache
    plan: PassPlan


class Replay:
    """The full model's continuations of prompts, ready to judge any mask. prompts: token ids.

    Raises: SearchError if every continuation ends at once, so that there is nothing to replay.
    """

    def __init__(self, model: ModelAdapter, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_on_repeat: int | None,
                 progress: Callable[[int, int], None] = lambda done, total: None):
        self.model, self._room = model, max_new_tokens - 1
        decoder = Decoder(model)
        self.tokens: list[list[int]] = []
        self._continuations: list[_Continuation] = []
        for done, prompt in enumerate(prompts, start=1):
            generated = decoder.generate(prompt, max_new_tokens, end_on_repeat=end_on_repeat).tokens
            self.tokens.append(generated)
            if len(generated) > 1:
                self._continuations.append(self._continue(list(prompt), generated))
            progress(done, len(prompts))
        if not self._continuations:
            raise SearchError("the model ends every calibration prompt with its first token, so there is nothing to draft: take "
                              "another task")

    @inference
    def _continue(self, prompt: list[int], generated: list[int]) -> _Continuation:
        device, n, start = self.model.spec.device, len(generated) - 1, len(prompt)
        text = start + n
        cache, planner = self.model.new_cache(1, text + n), Planner(text + n, device)
        forward(self.model, torch.tensor([prompt + generated[:-1]], device=device), cache, planner.chain(0, text), last_only=True)
        positions = torch.arange(start, text, device=device)[None]
        slots = torch.arange(text, text + n, device=device)[None]
        every = torch.arange(text + n, device=device)[None, None, None]
        visible = (every < positions[0][:, None]) | (every == slots[0][:, None])
        plan = PassPlan(positions, slots, text + n, visible, text)
        row = torch.tensor([generated], device=device)
        return _Continuation(row[:, :-1], row[:, 1:], cache, plan)

    @inference
    def __call__(self, mask: SkipMask) -> list[Replayed]:
        """One `Replayed` for each prompt whose continuation has two tokens or more."""
        judged = []
        for c in self._continuations:
            logits = forward(self.model, c.fed, c.cache, c.plan, mask).float()  # [1, G − 1, V]
            top, token = logits.max(dim=-1)
            confidence = (top - logits.logsumexp(dim=-1)).exp()
            judged.append(Replayed((token == c.following)[0].cpu().numpy(), confidence[0].cpu().numpy(), self._room))
        return judged

    def acceptance(self, mask: SkipMask) -> float:
        """α of the mask: share of positions at which its draft names the full model's token."""
        return float(np.concatenate([r.agrees for r in self(mask)]).mean())

    @inference
    def cosines(self) -> tuple[float, ...]:
        """Mean cosine of the residual stream before and after each sub-layer, in the flat order of `SkipMask`."""
        layers = self.model.spec.n_layers
        sums, count = np.zeros(2 * layers), 0
        for c in self._continuations:
            h = self.model.embed(c.fed)
            count += h.shape[1]
            for i in range(layers):
                for kind in range(2):
                    after = self.model.block(i, h, c.cache, c.plan, attn=kind == 0, mlp=kind == 1)
                    sums[2 * i + kind] += float(torch.nn.functional.cosine_similarity(h.float(), after.float(), dim=-1).sum())
                    h = after
        return tuple(float(s / count) for s in sums)
