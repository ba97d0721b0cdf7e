"""Requests whose logits are processed before a token is chosen from them: penalties, bans, constraints, whatever a caller brings.

A processor may look at the tokens so far and may remember what it saw. So it is asked once for each emitted position, in order, and never
with a token that was drafted and rejected: verification goes token by token here, and stops where the first draft falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skipsearch.decoding.acceptance import greedy_choice, residual
from skipsearch.errors import no_numbers

Processor = Callable[[Tensor, Tensor], Tensor]   # (token ids so far [1, T], logits [1, V]) -> logits [1, V]


class Steering:
    """One request's. processors: in their order. prompt: token ids [1, T] as the processors are to see them, padding included.

    most: tokens that may be emitted. sampled: tokens are drawn from the softmax of what the processors leave, else the largest is taken.
    emitted(ids so far [1, T], scores so far): told of each token as it is emitted; whether it is the last. keep_scores, keep_logits:
    collect in `scores` what the processors left, in `logits` what they were given, [1, V] for each emitted token.
    """

    def __init__(self, processors: Sequence[Processor], prompt: Tensor, most: int, sampled: bool = False,
                 emitted: Callable[[Tensor, list[Tensor] | None], bool] = lambda ids, scores: False, keep_scores: bool = False,
                 keep_logits: bool = False):
        self.processors, self.sampled, self.emitted = list(processors), sampled, emitted
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None
        self.ended = False
        self._ids = torch.cat([prompt, prompt.new_zeros(1, most)], dim=1)
        self._length = prompt.shape[1]

    @property
    def ids(self) -> Tensor:
        """[1, T]: the prompt and what was emitted."""
        return self._ids[:, :self._length]

    def accept(self, drafted: Tensor, q: Tensor | None, logits: Tensor, generator: torch.Generator) -> tuple[int, int]:
        """As `accept_greedy` and `accept_sampled` of acceptance.py: (drafted tokens that stand, the token that follows them).

        drafted: [N]; q: [N, V], what each was drawn from, None where it was certain; logits: [N + 1, V]. Where a drafted token that stands
        is the last of all, it is what follows.
        Raises: ModelError for logits that are not numbers.
        """
        for i, proposed in enumerate(drafted.tolist()):
            token, stands = self._judged(proposed, drafted[i], None if q is None else q[i], logits[i], generator)
            self._emit(token)
            if not stands or self.ended:
                return i, token
        token = self._chosen(self._processed(logits[-1]), generator)
        self._emit(token)
        return len(drafted), token

    def _judged(self, proposed: int, token: Tensor, q: Tensor | None, logits: Tensor, generator: torch.Generator) -> tuple[int, bool]:
        """(the token of this position, whether the proposed one stood)"""
        scores = self._processed(logits)
        if not self.sampled:
            token_there = int(scores.argmax())
            return token_there, token_there == proposed
        p = scores.softmax(dim=-1)[0]
        q = None if q is None else q.to(p.dtype)
        u = torch.rand((), generator=generator, device=p.device, dtype=p.dtype)
        if bool(u * (1 if q is None else q[proposed]) < p[proposed]):
            return proposed, True
        return int(torch.multinomial(residual(p, q, token), 1, generator=generator)), False

    def _chosen(self, scores: Tensor, generator: torch.Generator) -> int:
        if not self.sampled:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(dim=-1)[0], 1, generator=generator))

    def _processed(self, logits: Tensor) -> Tensor:
        """[1, V], in float32 as transformers hands them to its processors."""
        if int(greedy_choice(logits)) < 0:
            raise no_numbers()
        given = logits[None].float()
        if self.logits is not None:
            self.logits.append(given.clone())
        scores = given.clone()
        for process in self.processors:
            scores = process(self.ids, scores)
        if self.scores is not None:
            self.scores.append(scores)
        return scores

    def _emit(self, token: int) -> None:
        self._ids[0, self._length] = token
        self._length += 1
        self.ended = bool(self.emitted(self.ids, self.scores)) or self.ended
