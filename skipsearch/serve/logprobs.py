"""Log-probabilities of a text's tokens under the full model, for answers that are asked to tell them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.decoding.prefix import new_room
from skipsearch.engine import forward, inference
from skipsearch.models.spec import ModelAdapter

ROWS = 128   # of a pass, so that the logits of a long prompt need not lie in memory at once


@dataclass(frozen=True)
class TokenScore:
    """logprob: of the token, given those before it; None for the first token of a text. top: the likeliest tokens there, best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Scorer:
    """Reads one text, piece by piece, in a cache of its own. top: how many of the likeliest tokens to name at each place."""

    def __init__(self, model: ModelAdapter, top: int, most: int):
        """most: tokens that the text may come to."""
        self.model, self.top = model, min(top, model.spec.vocab)
        self._cache, self._planner = new_room(model, most)
        self._before: Tensor | None = None   # [V], log-probabilities of the token that comes next

    @inference
    def extend(self, tokens: Sequence[int]) -> list[TokenScore]:
        """The scores of tokens that follow those of earlier calls."""
        found: list[TokenScore] = []
        for at in range(0, len(tokens), ROWS):
            found += self._piece(list(tokens[at:at + ROWS]))
        return found

    def _piece(self, tokens: list[int]) -> list[TokenScore]:
        ids = torch.tensor([tokens], device=self.model.spec.device)
        start = self._cache.length
        logits = forward(self.model, ids, self._cache, self._planner.chain(start, len(tokens)))[0]
        self._cache.length = start + len(tokens)
        rows = logits.double().log_softmax(dim=-1)
        known = [] if self._before is None else [self._before[None]]
        places = torch.cat([*known, rows[:-1]])          # row i: what was known before token i, but for a text's first token
        scored = tokens[len(tokens) - len(places):]
        values = places.gather(1, ids[0, -len(places):, None])[:, 0].tolist() if len(places) else []
        best = places.topk(self.top, dim=-1) if self.top and len(places) else None
        tops = [()] * len(places) if best is None else [
            tuple(zip(at, worth, strict=True)) for at, worth in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        self._before = rows[-1]
        first = [TokenScore(tokens[0], None)] if len(places) < len(tokens) else []
        return [*first, *(TokenScore(t, v, top) for t, v, top in zip(scored, values, tops, strict=True))]
