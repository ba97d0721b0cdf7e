"""Draft, verify, commit: the decode loop. Without a drafter the same loop is plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from skipsearch.cache import KVCache, Planner
from skipsearch.decoding.acceptance import accept_greedy, accept_sampled
from skipsearch.decoding.arguments import token_ids
from skipsearch.decoding.guard import Guard
from skipsearch.decoding.sampling import GreedyPicker, Sampling, SamplingPicker, is_whole
from skipsearch.decoding.stopping import Stopper
from skipsearch.drafters import DecodeContext, Draft, DraftSession
from skipsearch.engine import EXACT_KEYS, EXACT_ROWS, exact_forward, forward, inference
from skipsearch.errors import DecodeError
from skipsearch.models.spec import ModelAdapter
from skipsearch.recipe import Recipe
from skipsearch.stats import DecodeStats, DrafterStats, Price


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
    """One generation under way: everything that changes while it runs."""

    ctx: DecodeContext
    sampling: Sampling
    stopper: Stopper
    generator: torch.Generator
    sessions: list[DraftSession]
    guard: Guard | None
    stats: DecodeStats = field(default_factory=DecodeStats)


class DecodeLoop:
    """The engine room of `Decoder`: one model and the drafters of one recipe. Any number of threads may stream from it at once.

    exact: passes of the full model have one fixed shape, so that their bits do not depend on what was drafted.
    prices: what the guard weighs the rounds of each drafter by; None for one that it leaves alone. folders: where trained parts lie.
    """

    def __init__(self, model: ModelAdapter, recipe: Recipe, exact: bool = False, prices: Sequence[Price | None] = (),
                 folders: Sequence[Path] = ()):
        self.model, self.exact, self.prices = model, exact, prices
        self.drafters = [(spec.draft_length, spec.build(model, folders)) for spec in recipe.drafters]
        self._spare: list[tuple[KVCache, Planner]] = []   # the cache of the last request that ended

    def stream(self, prompt: Sequence[int], sampling: Sampling, stopper: Stopper, seed: int = 0) -> Iterator[Chunk]:
        """Chunks of committed tokens, a round each, the prefill's first token alone in the first."""
        cache, planner = self._room_for(len(prompt) + stopper.max_new_tokens)
        try:
            request, first = self._prefill(prompt, sampling, stopper, seed, cache, planner)
            stats, emitted = request.stats, [first]
            while True:
                reason, committed = None, []
                for token in emitted:
                    committed.append(token)
                    reason = stopper.push(token)
                    if reason:
                        break
                stats.tokens += len(committed)
                stats.round_tokens = stats.tokens - 1
                request.ctx.history.extend(committed)
                text = None if stopper.text is None else stopper.text.take(last=reason is not None)
                yield Chunk(committed, text, reason, stats if reason else None)
                if reason:
                    return
                emitted = self._round(request, stopper.max_new_tokens - stopper.n_tokens)
        finally:
            self._spare = [(cache, planner)]

    @inference
    def _prefill(self, prompt: Sequence[int], sampling: Sampling, stopper: Stopper, seed: int, cache: KVCache,
                 planner: Planner) -> tuple[_Request, int]:
        device = self.model.spec.device
        started = self._clock()
        generator = torch.Generator(device).manual_seed(seed)
        picker = GreedyPicker() if sampling.greedy else SamplingPicker(sampling, generator)
        rows = torch.tensor([list(prompt)], device=device)
        ctx = DecodeContext(self.model, cache, planner, rows[:, -1:], list(prompt), len(prompt), picker)
        request = _Request(ctx, sampling, stopper, generator, [], Guard(self.prices) if any(self.prices) else None)
        logits = self._full(rows, cache, planner, last_only=True)[0]  # [1, V]
        cache.length = len(prompt)
        _, token = self._accept(request, rows[0, :0], None, logits)
        ctx.pending = rows.new_tensor([[token]])
        request.sessions = [drafter.begin(ctx) for _, drafter in self.drafters]
        request.stats.prompt_tokens = len(prompt)
        request.stats.by_drafter = [DrafterStats() for _ in self.drafters]
        request.stats.prefill_seconds = self._clock() - started
        return request, token

    @inference
    def _round(self, request: _Request, room: int) -> list[int]:
        """One draft and its verify pass. Returns the accepted tokens and the one the full model adds, at most `room` in all."""
        ctx, stats, cache = request.ctx, request.stats, request.ctx.cache
        started = perf_counter()
        by, draft = self._draft(request, room - 1)
        rows = ctx.pending if draft is None else torch.cat([ctx.pending, draft.tokens[None]], dim=1)  # [1, 1 + N]
        drafted_at = perf_counter()

        n_drafted = rows.shape[1] - 1
        logits = self._full(rows, cache, ctx.planner)[0]  # [1 + N, V]
        accepted, following = self._accept(request, rows[0, 1:], None if draft is None else draft.probs, logits)
        cache.length += 1 + accepted  # rejected K/V stays behind; the next verify overwrites it before anything reads it
        ctx.pending = rows.new_tensor([[following]])
        if draft is not None:
            request.sessions[by].verified(ctx, accepted)
            copied = 0 if draft.source is None else min(accepted, max(0, ctx.prompt - draft.source))
            stats.by_drafter[by].count(n_drafted, accepted, accepted < n_drafted, copied)
        if request.guard is not None:
            request.guard.passed(None if draft is None else by, n_drafted, accepted)

        ended = perf_counter()
        if draft is not None:
            stats.by_drafter[by].draft_seconds += drafted_at - started
            stats.by_drafter[by].verify_seconds += ended - drafted_at
        stats.rounds += 1
        stats.drafted += n_drafted
        stats.accepted += accepted
        stats.rejecting_rounds += accepted < n_drafted
        stats.draft_seconds += drafted_at - started
        stats.verify_seconds += ended - drafted_at
        stats.decode_seconds += ended - started
        return [*rows[0, 1:1 + accepted].tolist(), following]

    def _draft(self, request: _Request, room: int) -> tuple[int, Draft | None]:
        """(whose draft, the draft) of the first drafter that proposes something, of at most `room` tokens; (0, None) if none does."""
        for i, ((draft_length, _), session) in enumerate(zip(self.drafters, request.sessions, strict=True)):
            most = min(draft_length, room)
            if request.guard is not None and request.guard.rests(i):
                continue
            if most > 0 and (draft := session.draft(request.ctx, most)) is not None:
                return i, draft
        return 0, None

    def _full(self, tokens: Tensor, cache: KVCache, planner: Planner, last_only: bool = False) -> Tensor:
        """The full model over tokens [1, T] behind what is committed."""
        if self.exact:
            return exact_forward(self.model, tokens, cache, planner, cache.length, last_only)
        return forward(self.model, tokens, cache, planner.chain(cache.length, tokens.shape[1]), last_only=last_only)

    def _accept(self, request: _Request, drafted: Tensor, q: Tensor | None, logits: Tensor) -> tuple[int, int]:
        picker = request.ctx.picker
        if isinstance(picker, SamplingPicker):
            return accept_sampled(drafted, q, picker.probs(logits), request.generator)
        return accept_greedy(drafted, logits)

    def _room_for(self, tokens: int) -> tuple[KVCache, Planner]:
        """The cache of the last request, emptied, or a larger one. A drafter never writes past the last token that may come.

        It is lent until the request ends, so that another one that starts meanwhile takes its own.
        """
        if self.exact:  # rows that fill a pass up write behind the last token; a power of two from one block of keys on is whole blocks
            tokens = max(tokens + EXACT_ROWS - 1, EXACT_KEYS)
        try:
            cache, planner = self._spare.pop()  # in one step, so that no two threads take the same one
            if cache.capacity >= tokens:
                cache.reset()
                return cache, planner
        except IndexError:
            pass
        capacity = max(256, 1 << (tokens - 1).bit_length())
        return self.model.new_cache(1, capacity), Planner(capacity, self.model.spec.device)

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
