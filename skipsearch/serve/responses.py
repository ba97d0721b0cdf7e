"""Responses in OpenAI's form: full ones, and the events of streams."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from time import time
from typing import Any

from skipsearch.core.stats import DecodeStats, DrafterStats
from skipsearch.decoding.stopping import Detokenizer
from skipsearch.decoding.tracing import Proposal
from skipsearch.models.chat.call_reader import CallDelta, CallReader, SchemaCallReader, merge_deltas
from skipsearch.models.chat.thinking import ThinkingReader
from skipsearch.models.token_bytes import TokenBytes
from skipsearch.serve.logprobs import NamedToken, SentToken, TokenPlaces
from skipsearch.serve.scheduler import RoundOutput

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "time": "length"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_EVENT = b": still here\n\n"


def encode(data: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8.

    A lone surrogate, which an error may quote from a request, becomes a question mark.
    """
    return json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def encode_event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


@dataclass
class Choice:
    """One answer of a response, as it grows.

    drafter_kinds: kinds of the recipe's drafters.
    echo: text that the answer begins with: the prompt, if the request sets `echo`.
    hide_tokens: `max_tokens` is 0. The decoder always generates a token; it is not returned.
    thinking: reads the thinking out of the text; None if the model does not think.
    calls: reads the calls of tools out of the other text; None if there are no tools.
    reasoning: the thinking so far. n_reasoning: its tokens.
    tool_calls: the calls so far, as OpenAI's field `tool_calls`.
    n_tokens: tokens generated.
    """

    index: int
    tokenizer: Any
    drafter_kinds: Sequence[str]
    echo: str = ""
    hide_tokens: bool = False
    thinking: ThinkingReader | None = None
    calls: CallReader | SchemaCallReader | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    n_reasoning: int = 0
    scores: list[SentToken] = field(default_factory=list)
    finish_reason: str | None = None
    stats: DecodeStats | None = None
    n_tokens: int = 0
    _detokenizer: Detokenizer | None = None
    _first_tokens: list[int] = field(default_factory=list)  # up to the end of the thinking

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    @cached_property
    def _places(self) -> TokenPlaces:
        return TokenPlaces(self._token_bytes, self.echo)

    def add_round(self, output: RoundOutput) -> ChoiceDelta:
        """Append the output of one round and return the delta for the stream."""
        chunk = output.chunk
        if chunk is None:
            self.finish_reason = "length"
            return ChoiceDelta(self, "", ())
        self.n_tokens += 0 if self.hide_tokens else len(chunk.tokens)
        self.stats = chunk.stats or self.stats
        if chunk.finish_reason is not None:
            self.finish_reason = (
                "length" if self.hide_tokens else FINISH_REASONS[chunk.finish_reason]
            )
        text = (self.echo if not self.text else "") + ("" if self.hide_tokens else chunk.text or "")
        n_prompt = max(0, len(output.scores) - len(chunk.tokens))
        of_prompt, of_answer = output.scores[:n_prompt], output.scores[n_prompt:]
        scores = [self._places.place_prompt_token(score) for score in of_prompt]
        if not self.hide_tokens:
            scores += [self._places.place_answer_token(score) for score in of_answer]
        thought, calls = "", list[dict[str, Any]]()
        is_last = chunk.finish_reason is not None
        if self.thinking is not None and self.thinking.may_think:
            self._first_tokens += chunk.tokens
            thought, text = self.thinking.feed(text, is_last)
            self.n_reasoning = self.thinking.count_tokens(self.tokenizer, self._first_tokens)
        elif self.thinking is not None:
            _, text = self.thinking.feed(text, is_last)
        if self.calls is not None:
            text, deltas = self.calls.feed(text, is_last)
            calls = [self._add_call_delta(delta) for delta in merge_deltas(deltas)]
            if self.finish_reason == "stop" and self.tool_calls:
                self.finish_reason = "tool_calls"
        self.text += text
        self.reasoning += thought
        self.scores += scores
        return ChoiceDelta(self, text, scores, chunk.tokens, chunk.proposal, calls, thought)

    def _add_call_delta(self, delta: CallDelta) -> dict[str, Any]:
        """Add to `tool_calls`; return the entry of a stream's delta."""
        function: dict[str, str] = {"arguments": delta.arguments}
        entry: dict[str, Any] = {"index": delta.index, "function": function}
        if delta.name is None:
            self.tool_calls[delta.index]["function"]["arguments"] += delta.arguments
            return entry
        function["name"] = delta.name
        head = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        self.tool_calls.append({**head, "function": dict(function)})
        return entry | head

    def decode_token(self, token: int) -> str:
        """Return the text of one token."""
        return to_text(self._token_bytes.read(token))

    def settled_text(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each of the next tokens completes.

        A character of several tokens is returned with the last of them.
        """
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(self.tokenizer)
        texts = []
        for token in tokens:
            self._detokenizer.push_token(token)
            texts.append(self._detokenizer.pop_text())
        return texts


def to_text(token: bytes) -> str:
    """Return the text of a token; a part of a character is a replacement character."""
    return token.decode("utf-8", "replace")


@dataclass(frozen=True)
class ChoiceDelta:
    """What one round added to a choice. Its methods return it in the forms of the responses."""

    choice: Choice
    text: str
    scores: Sequence[SentToken]
    tokens: Sequence[int] = ()
    proposal: Proposal | None = None
    tool_calls: Sequence[dict[str, Any]] = ()  # entries of a stream's delta
    reasoning: str = ""

    def completion_logprobs(self) -> dict[str, Any] | None:
        """Return the `logprobs` of a completion; None if the request did not ask for them."""
        if not self.scores:
            return None
        return {
            "tokens": [to_text(score.token.name) for score in self.scores],
            "token_logprobs": [score.logprob for score in self.scores],
            "text_offset": [score.offset for score in self.scores],
            "top_logprobs": [_top_by_text(score) for score in self.scores],
        }

    def chat_logprobs(self) -> dict[str, Any] | None:
        """Return the `logprobs` of a chat completion; None if the request did not ask for them."""
        if not self.scores:
            return None

        def entry(token: NamedToken, logprob: float | None) -> dict[str, Any]:
            return {"token": to_text(token.name), "logprob": logprob, "bytes": list(token.utf8)}

        return {
            "content": [
                entry(score.token, score.logprob)
                | {"top_logprobs": [entry(*one) for one in score.top]}
                for score in self.scores
            ],
            "refusal": None,
        }

    def trace_round(self) -> dict[str, Any]:
        """Return the trace of the round: which drafter proposed each part of the text, and what was
        rejected.

        `by` is null for a token of the full model.
        """
        accepted = 0 if self.proposal is None else self.proposal.count_accepted(self.tokens)
        kind = (
            None
            if self.proposal is None
            else self.choice.drafter_kinds[self.proposal.drafter_index]
        )
        texts = self.choice.settled_text(self.tokens)
        rejected = (
            []
            if self.proposal is None
            else [self.choice.decode_token(t) for t in self.proposal.rejected_tokens(self.tokens)]
        )
        return {
            "pieces": [
                {"text": text, "by": kind if i < accepted else None} for i, text in enumerate(texts)
            ],
            "rejected": {"by": kind, "words": rejected} if rejected else None,
            "round": len(self.tokens),
        }


def _top_by_text(score: SentToken) -> dict[str, float] | None:
    """Return log-probabilities by text of the token.

    Tokens that are parts of characters have the same text; the most likely of them is listed.
    """
    if score.logprob is None:
        return None
    by_text: dict[str, float] = {}
    for token, logprob in (*score.top, (score.token, score.logprob)):
        by_text.setdefault(to_text(token.name), logprob)
    return by_text


def _message(choice: Choice) -> dict[str, Any]:
    """Return the message of a chat's answer. Next to calls or thinking, empty content is null."""
    more = _reasoning(choice.reasoning)
    if choice.tool_calls:
        more["tool_calls"] = choice.tool_calls
    content: str | None = choice.text.strip() if choice.tool_calls else choice.text
    if more:
        content = content or None
    return {"role": "assistant", "content": content, "refusal": None} | more


def _reasoning(text: str) -> dict[str, Any]:
    """Return the field of a message, or of a delta, for the thinking."""
    return {"reasoning_content": text} if text else {}


def count_usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    """Return the `usage` of a request.

    prompt_tokens: tokens of its prompts, each counted once.
    """
    generated = sum(choice.n_tokens for choice in choices)
    stats = sum_stats(choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": min(stats.cached_tokens, prompt_tokens)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.n_reasoning for choice in choices),
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }


def sum_stats(choices: Sequence[Choice]) -> DecodeStats:
    """Return the statistics of all answers together."""
    return sum((choice.stats for choice in choices if choice.stats is not None), DecodeStats())


def report_drafting(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    """Return what drafting did, in the fields of vLLM (`metrics`) and llama.cpp (`timings`).

    Source: vLLM's per-request metrics of speculative decoding; llama.cpp's `llama-server`.
    """
    stats = sum_stats(choices)
    drafter = sum(stats.by_drafter, DrafterStats())
    at_least = [drafter.rounds, *drafter.accepted_at, 0]
    predicted_ms, prompt_ms = 1e3 * stats.decode_seconds, 1e3 * stats.prefill_seconds
    read_tokens = prompt_tokens - min(stats.cached_tokens, prompt_tokens)
    return {
        "metrics": {
            "speculative_decoding": {
                "num_spec_steps": drafter.rounds,
                "num_draft_tokens": drafter.drafted,
                "num_accepted_draft_tokens": drafter.accepted,
                "draft_acceptance_rate": _ratio(drafter.accepted, drafter.drafted),
                "mean_acceptance_length": _ratio(drafter.accepted + drafter.rounds, drafter.rounds),
                "acceptance_histogram": [a - b for a, b in pairwise(at_least)],
            }
        },
        "timings": {
            "cache_n": prompt_tokens - read_tokens,
            "prompt_n": read_tokens,
            "prompt_ms": prompt_ms,
            "prompt_per_second": _ratio(1e3 * read_tokens, prompt_ms),
            "predicted_n": stats.tokens,
            "predicted_ms": predicted_ms,
            "predicted_per_second": _ratio(1e3 * stats.round_tokens, predicted_ms),
            "draft_n": drafter.drafted,
            "draft_n_accepted": drafter.accepted,
        },
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def summarise_decoding(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the statistics of how a request was decoded."""
    stats = sum_stats(choices)
    pace = stats.seconds_per_token
    return {
        "tau": stats.tau,
        "alpha": stats.alpha,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tokens_per_second": 1 / pace if pace else None,
        "prefill_seconds": stats.prefill_seconds,
        "by_drafter": [
            {"kind": kind, "rounds": by.rounds, "drafted": by.drafted, "accepted": by.accepted}
            for kind, by in zip(choices[0].drafter_kinds, stats.by_drafter, strict=False)
        ]
        if choices
        else [],
    }


@dataclass(frozen=True)
class ResponseBuilder:
    """The fields that all responses and events of one request share."""

    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time()))

    def wrap(self, choices: list[dict[str, Any]], streamed: bool, **more: Any) -> dict[str, Any]:
        """Return a response, or an event of a stream, with these choices."""
        kind = (
            ("chat.completion.chunk" if streamed else "chat.completion")
            if self.chat
            else "text_completion"
        )
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | more

    def opening_chunk(self, index: int) -> dict[str, Any]:
        """Return the first event of a chat completion's choice, which names the role."""
        return self.wrap(
            [
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
            True,
        )

    def delta_chunk(
        self, delta: ChoiceDelta, finish_reason: str | None, **more: Any
    ) -> dict[str, Any]:
        """Return the event for what a round added to a choice."""
        if self.chat:
            more_fields = _reasoning(delta.reasoning)
            if delta.tool_calls:
                more_fields["tool_calls"] = list(delta.tool_calls)
            has_content = delta.text or not (finish_reason or more_fields)
            choice = {
                "index": delta.choice.index,
                "delta": ({"content": delta.text} if has_content else {}) | more_fields,
                "logprobs": delta.chat_logprobs(),
                "finish_reason": finish_reason,
            }
        else:
            choice = {
                "index": delta.choice.index,
                "text": delta.text,
                "logprobs": delta.completion_logprobs(),
                "finish_reason": finish_reason,
            }
        return self.wrap([choice], True, **more)

    def full_response(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """Return the full response, for a request that does not stream."""
        entries = []
        for choice in choices:
            delta = ChoiceDelta(choice, choice.text, choice.scores)
            if self.chat:
                entries.append(
                    {
                        "index": choice.index,
                        "message": _message(choice),
                        "logprobs": delta.chat_logprobs(),
                        "finish_reason": choice.finish_reason,
                    }
                )
            else:
                entries.append(
                    {
                        "index": choice.index,
                        "text": choice.text,
                        "logprobs": delta.completion_logprobs(),
                        "finish_reason": choice.finish_reason,
                    }
                )
        return self.wrap(
            entries,
            False,
            usage=count_usage(choices, prompt_tokens),
            skipsearch=summarise_decoding(choices),
            **report_drafting(choices, prompt_tokens),
        )
