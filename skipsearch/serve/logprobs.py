"""Log-probabilities of a text's tokens under the full model, for answers that are asked to tell
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.engine import forward, no_grad
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner, round_slots

ROWS_PER_PASS = 128  # of a pass, so that the logits of a long prompt need not lie in memory at once


@dataclass(frozen=True)
class TokenScore:
    """logprob: of the token, given those before it; None for the first token of a text. top: the
    likeliest tokens there, best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class LogprobScorer:
    """Reads one text, piece by piece, in a cache of its own. n_top: how many of the likeliest
    tokens to name at each place.
    """

    def __init__(self, model: ModelAdapter, n_top: int, max_tokens: int):
        """max_tokens: tokens that the text may come to."""
        self.model, self.n_top = model, min(n_top, model.spec.vocab_size)
        self._cache, self._planner = (
            model.new_cache(1, round_slots(1)),
            Planner(round_slots(max_tokens), model.spec.device),
        )
        self._last_logits: Tensor | None = (
            None  # [V], log-probabilities of the token that comes next
        )

    @no_grad
    def extend(self, tokens: Sequence[int]) -> list[TokenScore]:
        """The scores of tokens that follow those of earlier calls."""
        found: list[TokenScore] = []
        for at in range(0, len(tokens), ROWS_PER_PASS):
            found += self._score_piece(list(tokens[at : at + ROWS_PER_PASS]))
        return found

    def _score_piece(self, tokens: list[int]) -> list[TokenScore]:
        ids = torch.tensor([tokens], device=self.model.spec.device)
        start = self._cache.length
        logits = forward(
            self.model, ids, self._cache, self._planner.plan_chain(start, len(tokens))
        )[0]
        self._cache.length = start + len(tokens)
        rows = logits.double().log_softmax(dim=-1)
        known = [] if self._last_logits is None else [self._last_logits[None]]
        places = torch.cat(
            [*known, rows[:-1]]
        )  # row i: what was known before token i, but for a text's first token
        scored = tokens[len(tokens) - len(places) :]
        values = (
            places.gather(1, ids[0, -len(places) :, None])[:, 0].tolist() if len(places) else []
        )
        best = places.topk(self.n_top, dim=-1) if self.n_top and len(places) else None
        tops = (
            [()] * len(places)
            if best is None
            else [
                tuple(zip(at, worth, strict=True))
                for at, worth in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        )
        self._last_logits = rows[-1]
        first = [TokenScore(tokens[0], None)] if len(places) < len(tokens) else []
        return [
            *first,
            *(TokenScore(t, v, top) for t, v, top in zip(scored, values, tops, strict=True)),
        ]
