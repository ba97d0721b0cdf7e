"""Answers in OpenAI's shapes: whole ones, and the events of those that stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from skipsearch.decoding.stopping import TextStream
from skipsearch.decoding.watching import Proposal
from skipsearch.serve.desk import Piece
from skipsearch.serve.logprobs import TokenScore
from skipsearch.stats import DecodeStats

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n\n"


@dataclass
class Choice:
    """One answer as it forms. kinds: of the recipe's drafters. echo: what its text begins with."""

    index: int
    tokenizer: Any
    kinds: Sequence[str]
    echo: str = ""
    drops_all: bool = False    # nothing was to be generated: a token that was is not shown
    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    finish: str | None = None
    stats: DecodeStats | None = None
    counted: int = 0           # tokens generated
    _pieces: TextStream | None = None
    _offset: int = 0           # of the next token that log-probabilities are told of, in characters

    def add(self, piece: Piece) -> Added:
        """What a piece adds to it."""
        chunk = piece.chunk
        if chunk is None:
            self.finish = "length"
            return Added(self, "", ())
        self.counted += 0 if self.drops_all else len(chunk.tokens)
        self.stats = chunk.stats or self.stats
        if chunk.finish_reason is not None:
            self.finish = "length" if self.drops_all else REASONS[chunk.finish_reason]
        text = (self.echo if not self.text else "") + ("" if self.drops_all else chunk.text or "")
        scores = piece.scores[:-len(chunk.tokens)] if self.drops_all else piece.scores
        self.text += text
        self.scores += scores
        return Added(self, text, scores, chunk.tokens, chunk.proposal)

    def word(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def as_shown(self, tokens: Sequence[int]) -> list[str]:
        """The text that each of these next tokens settled; a character of several tokens is the last one's."""
        if self._pieces is None:
            self._pieces = TextStream(self.tokenizer)
        shown = []
        for token in tokens:
            self._pieces.push(token)
            shown.append(self._pieces.take())
        return shown


@dataclass(frozen=True)
class Added:
    """What one round added to a choice, in the forms in which it is told."""

    choice: Choice
    text: str
    scores: Sequence[TokenScore]
    tokens: Sequence[int] = ()
    proposal: Proposal | None = None

    def completion_logprobs(self) -> dict[str, Any] | None:
        if not self.scores:
            return None
        words = [self.choice.word(score.token) for score in self.scores]
        offsets = []
        for word in words:
            offsets.append(self.choice._offset)
            self.choice._offset += len(word)
        return {"tokens": words, "token_logprobs": [score.logprob for score in self.scores], "text_offset": offsets,
                "top_logprobs": [self._top(score) for score in self.scores]}

    def _top(self, score: TokenScore) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        named: dict[str, float] = {}
        for token, logprob in score.top:   # tokens that are parts of characters look alike: the likeliest of them is told
            named.setdefault(self.choice.word(token), logprob)
        named.setdefault(self.choice.word(score.token), score.logprob)
        return named

    def chat_logprobs(self) -> dict[str, Any] | None:
        if not self.scores:
            return None

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            word = self.choice.word(token)
            return {"token": word, "logprob": logprob, "bytes": list(word.encode("utf-8", "replace"))}

        return {"content": [entry(score.token, score.logprob) | {"top_logprobs": [entry(*one) for one in score.top]}
                            for score in self.scores], "refusal": None}

    def trace(self) -> dict[str, Any]:
        """Who proposed which piece of text, and what was rejected; `by` null is the full model itself."""
        accepted = 0 if self.proposal is None else self.proposal.accepted(self.tokens)
        kind = None if self.proposal is None else self.choice.kinds[self.proposal.drafter]
        shown = self.choice.as_shown(self.tokens)
        rejected = [] if self.proposal is None else [self.choice.word(t) for t in self.proposal.rejected(self.tokens)]
        return {"pieces": [{"text": text, "by": kind if i < accepted else None} for i, text in enumerate(shown)],
                "rejected": {"by": kind, "words": rejected} if rejected else None, "round": len(self.tokens)}


def usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    """Tokens of a whole request. prompt_tokens: of its prompts, each once."""
    generated = sum(choice.counted for choice in choices)
    stats = sum((choice.stats for choice in choices if choice.stats is not None), DecodeStats())
    return {"prompt_tokens": prompt_tokens, "completion_tokens": generated, "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": min(stats.cached_tokens, prompt_tokens)},
            "completion_tokens_details": {"accepted_prediction_tokens": stats.accepted,
                                          "rejected_prediction_tokens": stats.drafted - stats.accepted}}


def figures(choices: Sequence[Choice]) -> dict[str, Any]:
    """How a request was decoded."""
    stats = sum((choice.stats for choice in choices if choice.stats is not None), DecodeStats())
    pace = stats.seconds_per_token
    return {"tau": stats.tau, "alpha": stats.alpha, "rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted,
            "tokens_per_second": 1 / pace if pace else None, "prefill_seconds": stats.prefill_seconds,
            "by_drafter": [{"kind": kind, "rounds": by.rounds, "drafted": by.drafted, "accepted": by.accepted}
                           for kind, by in zip(choices[0].kinds, stats.by_drafter, strict=False)] if choices else []}


@dataclass(frozen=True)
class Envelope:
    """What stands around every answer and every event of one request."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time()))

    def around(self, choices: list[dict[str, Any]], streamed: bool, **more: Any) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices} | more

    def opening(self, index: int) -> dict[str, Any]:
        """The first event of a chat's answer says whose turn it is."""
        return self.around([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}], True)

    def streamed(self, added: Added, finish: str | None, **more: Any) -> dict[str, Any]:
        if self.chat:
            choice = {"index": added.choice.index, "delta": {"content": added.text} if added.text or not finish else {},
                      "logprobs": added.chat_logprobs(), "finish_reason": finish}
        else:
            choice = {"index": added.choice.index, "text": added.text, "logprobs": added.completion_logprobs(), "finish_reason": finish}
        return self.around([choice], True, **more)

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        told = []
        for choice in choices:
            added = Added(choice, choice.text, choice.scores)
            if self.chat:
                told.append({"index": choice.index, "message": {"role": "assistant", "content": choice.text, "refusal": None},
                             "logprobs": added.chat_logprobs(), "finish_reason": choice.finish})
            else:
                told.append({"index": choice.index, "text": choice.text, "logprobs": added.completion_logprobs(),
                             "finish_reason": choice.finish})
        return self.around(told, False, usage=usage(choices, prompt_tokens), skipsearch=figures(choices))
