"""Log-probabilities of tokens under the full model, for requests that ask for them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skipsearch.constraints import Matcher
from skipsearch.decoding import make_masks, mask_logits
from skipsearch.engine import forward, no_grad
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import Planner, round_slots
from skipsearch.models.token_bytes import TokenBytes

ROWS_PER_PASS = 128  # limits the memory for the logits of a long prompt


@dataclass(frozen=True)
class TokenScore:
    """The log-probability of one token.

    logprob: given the tokens before it; None for the first token of a text.
    top: (token, log-probability) of the most likely tokens at this position, best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class NamedToken:
    """A token as clients see it. name: in UTF-8. utf8: a part of the text's; b"" if special."""

    name: bytes
    utf8: bytes


@dataclass(frozen=True)
class SentToken:
    """A token with its score, and its place in the text that a client gets.

    offset: in characters. top: (token, log-probability) of the most likely tokens, best first.
    """

    token: NamedToken
    offset: int
    logprob: float | None
    top: tuple[tuple[NamedToken, float], ...] = ()


class TokenPlaces:
    """The places of an answer's tokens in its text, as it is sent.

    echo: the prompt with which the text begins; its tokens come first.
    """

    def __init__(self, token_bytes: TokenBytes, echo: str = ""):
        self._token_bytes = token_bytes
        self._echo = echo.encode("utf-8", "replace")
        self._echo_read = 0  # bytes of the echo that the prompt's tokens so far stand for
        self._n_characters = 0  # of the text before the next token
        self._in_answer = False
        self._new_decoder = codecs.getincrementaldecoder("utf-8")
        self._decoder = self._new_decoder("replace")

    def place_prompt_token(self, score: TokenScore) -> SentToken:
        """Return a token of the prompt. One that the echo lacks, such as `<s>`, has no length."""
        own = self._token_bytes.read(score.token)
        offset = self._n_characters
        for sent in (own, own.removeprefix(b" ")):
            if self._echo.startswith(sent, self._echo_read):
                self._echo_read += len(sent)
                self._n_characters += len(self._decoder.decode(sent))
                break
        return self._make_sent(score, offset, self._token_bytes.read)

    def place_answer_token(self, score: TokenScore) -> SentToken:
        """Return a token of the answer. A part of a character is placed where the character is."""
        if not self._in_answer:
            self._in_answer = True
            self._decoder = self._new_decoder("replace")
            self._n_characters = len(self._echo.decode())
            self._read = self._token_bytes.read_first
        sent = self._make_sent(score, self._n_characters, self._read)
        if not self._token_bytes.is_special(score.token):
            self._n_characters += len(self._decoder.decode(sent.token.utf8))
            self._read = self._token_bytes.read
        return sent

    def _make_sent(self, score: TokenScore, offset: int, read: Callable[[int], bytes]) -> SentToken:
        def named(token: int) -> NamedToken:
            name = read(token)
            return NamedToken(name, b"" if self._token_bytes.is_special(token) else name)

        top = tuple((named(token), value) for token, value in score.top)
        return SentToken(named(score.token), offset, score.logprob, top)


class LogprobScorer:
    """A scorer of one text, part by part, with a separate KV cache.

    n_top: most likely tokens to list at each position.
    """

    def __init__(
        self, model: ModelAdapter, n_top: int, max_tokens: int, matcher: Matcher | None = None
    ):
        """Make a scorer of a text of at most `max_tokens` tokens.

        matcher: the constraint of the answer. Tokens that it forbids have probability 0.
        """
        self.matcher = matcher
        self.model, self.n_top = model, min(n_top, model.spec.vocab_size)
        self._cache, self._planner = (
            model.new_cache(1, round_slots(1)),
            Planner(round_slots(max_tokens), model.spec.device),
        )
        # [V], logits of the next token
        self._last_logits: Tensor | None = None

    @no_grad
    def extend(self, tokens: Sequence[int], is_answer: bool = False) -> list[TokenScore]:
        """Return the log-probabilities of `tokens`, which continue the tokens of earlier calls.

        is_answer: the tokens are of the answer, to which the constraint applies.
        """
        scores: list[TokenScore] = []
        for at in range(0, len(tokens), ROWS_PER_PASS):
            scores += self._score_chunk(list(tokens[at : at + ROWS_PER_PASS]), is_answer)
        return scores

    def _score_chunk(self, tokens: list[int], is_answer: bool) -> list[TokenScore]:
        """Score tokens in one pass, and keep the logits after the last of them."""
        ids = torch.tensor([tokens], device=self.model.spec.device)
        start = self._cache.length
        logits = forward(
            self.model, ids, self._cache, self._planner.plan_chain(start, len(tokens))
        )[0].double()
        self._cache.length = start + len(tokens)
        known = [] if self._last_logits is None else [self._last_logits[None]]
        # [n, V], one row for each token but a text's first one
        before = torch.cat([*known, logits[:-1]])
        n = len(before)
        scored = tokens[len(tokens) - n :]
        if is_answer and self.matcher is not None:
            masks = make_masks(self.matcher, scored[:-1], None, before.shape[1])
            before = mask_logits(before, masks)
            self.matcher.advance(scored[: self.matcher.count_legal(scored)])
        before = before.log_softmax(dim=-1)
        values = before.gather(1, ids[0, -n:, None])[:, 0].tolist() if n else []
        best = before.topk(self.n_top, dim=-1) if self.n_top and n else None
        tops = (
            [()] * n
            if best is None
            else [
                tuple(
                    (token, logprob)
                    for token, logprob in zip(top_ids, logprobs, strict=True)
                    if logprob > -torch.inf
                )
                for top_ids, logprobs in zip(
                    best.indices.tolist(), best.values.tolist(), strict=True
                )
            ]
        )
        self._last_logits = logits[-1]
        first = [TokenScore(tokens[0], None)] if n < len(tokens) else []
        return [
            *first,
            *(TokenScore(t, v, top) for t, v, top in zip(scored, values, tops, strict=True)),
        ]
