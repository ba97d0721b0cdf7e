"""Draft, verify, commit: the decode loop. Without a drafter the same loop is plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from skipsearch.cache import KVCache, Planner
from skipsearch.decoding.acceptance import accept_greedy, accept_sampled
from skipsearch.decoding.arguments import token_ids
from skipsearch.decoding.sampling import GreedyPicker, Sampling, SamplingPicker, is_whole
from skipsearch.decoding.stopping import Stopper
from skipsearch.drafters import DecodeContext, Drafter
from skipsearch.engine import EXACT_KEYS, EXACT_ROWS, exact_forward, forward, inference
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelAdapter
from skipsearch.stats import DecodeStats


@dataclass(frozen=True)
class Generation:
    """tokens: new ones only, an end-of-sequence token included. text: None without a tokenizer; cut before a stop string.

    finish_reason: "eos", "length", "stop" or "repeat".
    """

    tokens: list[int]
    finish_reason: str
    stats: DecodeStats
    text: str | None = None


@dataclass(frozen=True)
class Chunk:
    """What one round added. finish_reason and stats are set on the last chunk."""

    tokens: list[int]
    text: str | None
    finish_reason: str | None = None
    stats: DecodeStats | None = None


@dataclass
class _Request:
    """One generation under way."""

    ctx: DecodeContext
    sampling: Sampling
    stopper: Stopper
    generator: torch.Generator
    stats: DecodeStats = field(default_factory=DecodeStats)


class DecodeLoop:
    """The engine room of `Decoder`: one model, one drafter or none, one cache that is kept between requests.

    exact: passes of the full model have one fixed shape, so that their bits do not depend on what was drafted.
    """

    def __init__(self, model: ModelAdapter, drafter: Drafter | None = None, draft_length: int = 0, exact: bool = False):
        self.model, self.drafter, self.draft_length, self.exact = model, drafter, draft_length, exact
        self._cache: KVCache | None = None
        self._planner: Planner | None = None

    def stream(self, prompt: Sequence[int], sampling: Sampling, stopper: Stopper, seed: int = 0) -> Iterator[Chunk]:
        """Chunks of committed tokens, a round each, the prefill's first token alone in the first."""
        request, first = self._prefill(prompt, sampling, stopper, seed)
        stats, emitted = request.stats, [first]
        try:
            while True:
                reason, committed = None, []
                for token in emitted:
                    committed.append(token)
                    reason = stopper.push(token)
                    if reason:
                        break
                stats.tokens += len(committed)
                stats.round_tokens = stats.tokens - 1
                request.ctx.history[0].extend(committed)
                text = None if stopper.text is None else stopper.text.take(last=reason is not None)
                yield Chunk(committed, text, reason, stats if reason else None)
                if reason:
                    return
                emitted = self._round(request, stopper.max_new_tokens - stopper.n_tokens)
        finally:
            self._cache, self._planner = request.ctx.cache, request.ctx.planner

    @inference
    def _prefill(self, prompt: Sequence[int], sampling: Sampling, stopper: Stopper, seed: int) -> tuple[_Request, int]:
        device = self.model.spec.device
        started = self._clock()
        cache, planner = self._room_for(len(prompt) + stopper.max_new_tokens)
        generator = torch.Generator(device).manual_seed(seed)
        picker = GreedyPicker() if sampling.greedy else SamplingPicker(sampling, generator)
        rows = torch.tensor([list(prompt)], device=device)
        logits = self._full(rows, cache, planner, last_only=True)
        pending, _ = picker.draw(picker.score(logits[:, -1], sure=False))
        cache.length = len(prompt)
        ctx = DecodeContext(self.model, cache, planner, pending, [list(prompt)], picker)
        request = _Request(ctx, sampling, stopper, generator)
        token = int(pending)
        request.stats.prompt_tokens = len(prompt)
        request.stats.prefill_seconds = self._clock() - started
        return request, token

    @inference
    def _round(self, request: _Request, room: int) -> list[int]:
        """One draft and its verify pass. Returns the accepted tokens and the one the full model adds, at most `room` in all."""
        ctx, stats, cache = request.ctx, request.stats, request.ctx.cache
        started = perf_counter()
        draft = None
        rows = ctx.pending  # [1, 1]
        if self.drafter is not None and (most := min(self.draft_length, room - 1)) > 0:
            draft = self.drafter.draft(ctx, most)
            rows = torch.cat([ctx.pending, draft.tokens], dim=1)  # [1, 1 + N]
        drafted_at = perf_counter()

        n_drafted = rows.shape[1] - 1
        logits = self._full(rows, cache, ctx.planner)[0]  # [1 + N, V]
        accepted, following = self._accept(request, rows[0, 1:], draft.probs if draft else None, logits)
        cache.length += 1 + accepted  # rejected K/V stays behind; the next verify overwrites it before anything reads it
        ctx.pending = rows.new_tensor([[following]])
        if draft is not None and self.drafter is not None:
            self.drafter.commit([list(range(accepted))])

        ended = perf_counter()
        stats.rounds += 1
        stats.drafted += n_drafted
        stats.accepted += accepted
        stats.rejecting_rounds += accepted < n_drafted
        stats.draft_seconds += drafted_at - started
        stats.verify_seconds += ended - drafted_at
        stats.decode_seconds += ended - started
        return [*rows[0, 1:1 + accepted].tolist(), following]

    def _full(self, tokens: Tensor, cache: KVCache, planner: Planner, last_only: bool = False) -> Tensor:
        """The full model over tokens [1, T] behind what is committed."""
        if self.exact:
            return exact_forward(self.model, tokens, cache, planner, cache.length, last_only)
        return forward(self.model, tokens, cache, planner.chain(cache.length, tokens.shape[1]), last_only=last_only)

    def _accept(self, request: _Request, drafted: Tensor, q: Tensor | None, logits: Tensor) -> tuple[int, int]:
        picker = request.ctx.picker
        if isinstance(picker, SamplingPicker):
            return accept_sampled(drafted, q[0] if q is not None else None, picker.probs(logits), request.generator)
        return accept_greedy(drafted, logits)

    def _room_for(self, tokens: int) -> tuple[KVCache, Planner]:
        """The cache of the last request, emptied, or a larger one. A drafter never writes past the last token that may come.

        It is lent until the request ends, so that another one that starts meanwhile takes its own.
        """
        if self.exact:  # rows that fill a pass up write behind the last token; a power of two from one block of keys on is whole blocks
            tokens = max(tokens + EXACT_ROWS - 1, EXACT_KEYS)
        cache, planner, self._cache, self._planner = self._cache, self._planner, None, None
        if cache is None or planner is None or cache.capacity < tokens:
            capacity = max(256, 1 << (tokens - 1).bit_length())
            cache, planner = self.model.new_cache(1, capacity), Planner(capacity, self.model.spec.device)
        cache.reset()
        return cache, planner

    def _clock(self) -> float:
        if self.model.spec.device.type == "cuda":
            torch.cuda.synchronize(self.model.spec.device)
        return perf_counter()


def checked_prompt(prompt: Sequence[int] | Tensor, model: ModelAdapter, max_new_tokens: int) -> tuple[list[int], int]:
    """(token ids, tokens that may be generated): a request that fits the model. Raises: DecodeError."""
    ids, spec = token_ids(prompt), model.spec
    if not ids:
        raise DecodeError("the prompt is empty: give at least one token to go on from")
    outside = next((t for t in ids if not 0 <= t < spec.vocab), None)
    if outside is not None:
        raise DecodeError(f"token id {outside} is outside 0..{spec.vocab - 1}, the vocabulary of {spec.id}; "
                          "was it made by another tokenizer?")
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise DecodeError(f"max_new_tokens is {max_new_tokens!r}; ask for a whole number of tokens, at least 1")
    if spec.context is not None:
        if len(ids) >= spec.context:
            raise DecodeError(f"the prompt has {len(ids)} tokens and {spec.id} was made for {spec.context}, the answer included: "
                              "shorten it")
        max_new_tokens = min(int(max_new_tokens), spec.context - len(ids))
    return ids, int(max_new_tokens)
