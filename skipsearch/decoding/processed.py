"""Accept draft tokens of requests with logits processors, such as penalties, bans and constraints.

A processor may read the tokens so far and may have a state. It is therefore called once for each
emitted position, in order, and never with a rejected token. So tokens are accepted one by one, up
to the first rejected draft token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from skipsearch.constraints import Matcher
from skipsearch.decoding.acceptance import choose_greedy, residual
from skipsearch.engine import draws
from skipsearch.errors import non_finite_logits

FIRST_TOKENS = 256  # initial capacity for new ids; most requests end before their limit
# (token ids so far [1, T], logits [1, V]) -> logits [1, V]
Processor = Callable[[Tensor, Tensor], Tensor]


class ProcessedAcceptance:
    """The acceptance rule of one request, with its processors in order.

    prompt: token ids [1, T] for the processors, padding included. max_tokens: the most tokens that
    may be emitted.
    sampled: True: draw tokens from the softmax of the processed logits; False: choose the most
    likely token.
    on_token(ids so far [1, T], scores so far): is called after each emitted token; returns whether
    it is the last one.
    keep_scores, keep_logits: store the processed logits in `scores`, and the logits before
    processing in `logits`, [1, V] for each emitted token.
    `ended`: whether `on_token` or the request's stop condition has ended the generation.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        prompt: Tensor,
        max_tokens: int,
        sampled: bool = False,
        on_token: Callable[[Tensor, list[Tensor] | None], bool] = lambda ids, scores: False,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ):
        self.processors, self.sampled, self.on_token = list(processors), sampled, on_token
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None
        self.ended = False
        self._ids = torch.cat([prompt, prompt.new_zeros(1, min(max_tokens, FIRST_TOKENS))], dim=1)
        self._length = prompt.shape[1]

    @property
    def ids(self) -> Tensor:
        """The token ids of the prompt and the emitted tokens, [1, T]."""
        return self._ids[:, : self._length]

    def accept(
        self,
        draft_tokens: Tensor,
        q: Tensor | None,
        logits: Tensor,
        generator: torch.Generator,
        ends: Callable[[int], object],
    ) -> tuple[int, int]:
        """Accept draft tokens by the rules of `accept_greedy` and `accept_sampled`.

        draft_tokens: [N]. q: the distributions from which they were drawn, [N, V]; None: one-hot.
        logits: [N + 1, V]. ends(token): as `StopCondition.push_token`. No processor is called after
        the last token. Returns (number of accepted tokens, the token after them). If an accepted
        draft token ends the generation, it is returned as the token after them. Raises: ModelError
        if logits are not finite.
        """
        for i, proposed in enumerate(draft_tokens.tolist()):
            token, accepted = self._judge_token(
                proposed, draft_tokens[i], None if q is None else q[i], logits[i], generator
            )
            self._append_token(token, ends)
            if not accepted or self.ended:
                return i, token
        token = self._choose_token(self._process_logits(logits[-1]), generator)
        self._append_token(token, ends)
        return len(draft_tokens), token

    def _judge_token(
        self,
        draft_token: int,
        draft_token_tensor: Tensor,
        q: Tensor | None,
        logits: Tensor,
        generator: torch.Generator,
    ) -> tuple[int, bool]:
        """Return (the emitted token of this position, whether it is the draft token)."""
        scores = self._process_logits(logits)
        if not self.sampled:
            token = int(scores.argmax())
            return token, token == draft_token
        p = scores.softmax(dim=-1)[0]
        q = None if q is None else q.to(p.dtype)
        u = torch.rand((), generator=generator, device=p.device, dtype=p.dtype)
        if bool(u * (1 if q is None else q[draft_token]) < p[draft_token]):
            return draft_token, True
        weights = residual(p, q, draft_token_tensor)
        return int(draws.draw_tokens(weights, generator)), False

    def _choose_token(self, scores: Tensor, generator: torch.Generator) -> int:
        if not self.sampled:
            return int(scores.argmax())
        return int(draws.draw_tokens(scores.softmax(dim=-1)[0], generator))

    def _process_logits(self, logits: Tensor) -> Tensor:
        """Return processed logits [1, V]. Processors get float32, as in transformers."""
        if int(choose_greedy(logits)) < 0:
            raise non_finite_logits()
        scores = logits[None].to(torch.float32, copy=True)  # processors may write in place
        if self.logits is not None:
            self.logits.append(scores.clone())
        for process in self.processors:
            scores = process(self.ids, scores)
        if self.scores is not None:
            self.scores.append(scores)
        return scores

    def _append_token(self, token: int, ends: Callable[[int], object]) -> None:
        if self._length == self._ids.shape[1]:
            # Doubling copies each id less than twice on average.
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], dim=1)
        self._ids[0, self._length] = token
        self._length += 1
        # A list, because both functions must be called for each token.
        self.ended = any([ends(token), self.on_token(self.ids, self.scores)])


def mask_logits(logits: Tensor, masks: np.ndarray) -> Tensor:
    """Return logits that are -inf where `masks` is False. Both are [N, V].

    On a CPU, NumPy does so on the bits of the numbers: torch would wake its other threads twice,
    which takes a tenth of a millisecond.
    """
    if logits.device.type != "cpu":
        legal = torch.from_numpy(masks).to(logits.device)
        return logits.masked_fill(~legal, -torch.inf)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[logits.dtype.itemsize]
    bits = logits.detach().contiguous().view(integer).numpy()
    minus_infinity = torch.tensor(-torch.inf, dtype=logits.dtype).view(integer).numpy()
    return torch.from_numpy(np.where(masks, bits, minus_infinity)).view(logits.dtype)


class ConstraintProcessor:
    """The processor of a constraint: it rules out the tokens that may not follow.

    matcher: the state of the constraint at the start of the answer. n_prompt: tokens of the prompt.
    """

    def __init__(self, matcher: Matcher, n_prompt: int):
        self.matcher, self._n_read = matcher, n_prompt

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]; scores: [1, V] -> [1, V]"""
        self.catch_up(ids)
        mask = np.empty(scores.shape, dtype=bool)
        self.matcher.fill_mask(mask[0])
        return mask_logits(scores, mask)

    def catch_up(self, ids: Tensor) -> None:
        """Read the tokens of `ids` [1, T] that were emitted since the last call."""
        new = ids[0, self._n_read :].tolist()
        self._n_read = ids.shape[1]
        self.advance(new)

    def advance(self, tokens: Sequence[int]) -> None:
        """Read emitted tokens. Those after the end of the answer are not part of it."""
        for token in tokens:
            if self.matcher.has_ended:
                return
            self.matcher.advance([token])
