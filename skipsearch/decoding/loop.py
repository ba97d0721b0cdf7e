"""Draft, verify, commit: the decode loop. Without a drafter the same loop is plain autoregressive decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.decoding.acceptance import accept_greedy, accept_sampled
from skipsearch.decoding.chains import refuse_more_than_chains
from skipsearch.decoding.guard import Guard
from skipsearch.decoding.prefix import Lender, new_room
from skipsearch.decoding.request import ReadyRequest
from skipsearch.decoding.sampling import GreedyPicker, Sampling, SamplingPicker
from skipsearch.decoding.steering import Steering
from skipsearch.decoding.stopping import Stopper
from skipsearch.decoding.trees import accept_tree_greedy, accept_tree_sampled, ends_in_a_rejection
from skipsearch.decoding.watching import Proposal, Shown, Watch
from skipsearch.drafters import DecodeContext, Draft, DraftSession, Resume, WatchingDrafter, WatchingSession
from skipsearch.drafters.memory import Memory
from skipsearch.engine import EXACT_KEYS, EXACT_ROWS, Tap, exact_forward, forward, inference, resumed
from skipsearch.machine import synchronise
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

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Generation:
        """All chunks of one stream."""
        read = list(chunks)
        last = read[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        text = None if last.text is None else "".join(c.text or "" for c in read)
        return cls([t for c in read for t in c.tokens], last.finish_reason, last.stats, text)


@dataclass(frozen=True)
class Chunk:
    """What one round added. finish_reason and stats are set on the last chunk. proposal: what was drafted in that round, where the request
    is traced and something was."""

    tokens: list[int]
    text: str | None
    finish_reason: str | None = None
    stats: DecodeStats | None = None
    proposal: Proposal | None = None


@dataclass
class _Request:
    """One generation under way: everything that changes while it runs."""

    ctx: DecodeContext
    sampling: Sampling
    stopper: Stopper
    generator: torch.Generator
    sessions: list[DraftSession]
    guard: Guard | None
    steering: Steering | None = None
    watching: list[WatchingSession] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)


class DecodeLoop:
    """The engine room of `Decoder`: one model and the drafters of one recipe. Any number of threads may stream from it at once.

    exact: passes of the full model have one fixed shape, so that their bits do not depend on what was drafted.
    prices: what the guard weighs the rounds of each drafter by; None for one that it leaves alone. folders: where trained parts lie.
    remember: tokens of earlier answers that drafters may copy from; 0: each request for itself.
    """

    def __init__(self, model: ModelAdapter, recipe: Recipe, exact: bool = False, prices: Sequence[Price | None] = (),
                 folders: Sequence[Path] = (), remember: int = 0):
        self.model, self.exact, self.prices = model, exact, prices
        self.memory = Memory(remember) if remember else None
        self.drafters = [(spec.draft_length, spec.build(model, folders)) for spec in recipe.drafters]
        built = zip(recipe.drafters, (drafter for _, drafter in self.drafters), strict=True)
        refuse_more_than_chains(model.spec, [*built], exact)
        self._scratch = max((spec.scratch for spec in recipe.drafters), default=0)
        self.spare: list[tuple[KVCache, Planner]] = []   # the cache of the last request that ended

    def stream(self, asked: ReadyRequest, prefix: Lender | None = None, watch: Watch | None = None) -> Iterator[Chunk]:
        """Chunks of committed tokens, a round each, the prefill's first token alone in the first.

        prefix: what an earlier request left, and where this one leaves its K/V. watch: told what is proposed.
        """
        prompt, stopper = asked.prompt, asked.stopper
        slots, history = len(prompt) + stopper.max_new_tokens, prompt
        cache, planner = self._room_for(slots) if prefix is None else prefix.lend(prompt, self._slots(slots), self.model)
        try:
            request, first = self._prefill(prompt, asked.sampling, stopper, asked.seed, cache, planner, asked.steering)
            if watch is not None:
                watch.chains = self.exact or asked.steering is not None
                request.sessions = [watch.over(i, session) for i, session in enumerate(request.sessions)]
            stats, emitted, history = request.stats, [first], request.ctx.history
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
                yield Chunk(committed, text, reason, stats if reason else None, watch.take() if watch is not None else None)
                if reason:
                    return
                emitted = self._round(request, stopper.max_new_tokens - stopper.n_tokens)
        finally:
            if self.memory is not None and len(history) > len(prompt):
                self.memory.add(history[len(prompt):])
            if prefix is not None:
                prefix.give_back(history)
            else:
                self.spare = [(cache, planner)]

    @inference
    def _prefill(self, prompt: Sequence[int], sampling: Sampling, stopper: Stopper, seed: int, cache: KVCache, planner: Planner,
                 steering: Steering | None = None) -> tuple[_Request, int]:
        device = self.model.spec.device
        started = self._clock()
        generator = torch.Generator(device).manual_seed(seed)
        picker = GreedyPicker() if sampling.greedy else SamplingPicker(sampling, generator)
        known = cache.length   # tokens of the prompt whose K/V is there already
        rows = torch.tensor([list(prompt)], device=device)
        ctx = DecodeContext(self.model, cache, planner, rows[:, -1:], list(prompt), len(prompt), picker, self.memory)
        request = _Request(ctx, sampling, stopper, generator, [], Guard(self.prices) if any(self.prices) else None, steering)
        watching = {i: drafter.watch() for i, (_, drafter) in enumerate(self.drafters) if isinstance(drafter, WatchingDrafter)}
        request.watching = list(watching.values())
        logits = self._full(request, rows[:, known:], last_only=True)[0]  # [1, V]
        cache.length = len(prompt)
        _, token = self._accept(request, rows[0, :0], None, logits)
        ctx.pending = rows.new_tensor([[token]])
        request.sessions = [watching[i] if isinstance(drafter, WatchingDrafter) else drafter.begin(ctx)
                            for i, (_, drafter) in enumerate(self.drafters)]
        stats = request.stats
        for session in request.watching:
            began = self._clock()
            session.begin(ctx)
            stats.watched(self._clock() - began, session.chooses)
        stats.prompt_tokens, stats.cached_tokens = len(prompt), known
        stats.by_drafter = [DrafterStats() for _ in self.drafters]
        ended = self._clock()
        # What is watched while the prompt is read belongs to the drafts: plain decoding would not have spent that time.
        stats.prefill_seconds = ended - started - stats.watching_seconds
        stats.decode_seconds = stats.watching_seconds
        return request, token

    @inference
    def _round(self, request: _Request, room: int) -> list[int]:
        """One draft and its verify pass. Returns the accepted tokens and the one the full model adds, at most `room` in all."""
        ctx, stats, cache = request.ctx, request.stats, request.ctx.cache
        started = perf_counter()
        by, draft = self._draft(request, room - 1)
        rows = ctx.pending if draft is None else torch.cat([ctx.pending, draft.tokens[None]], dim=1)  # [1, 1 + N]
        drafted_at, watched = perf_counter(), stats.watching_seconds

        n_drafted = rows.shape[1] - 1 if draft is None or draft.trunk is None else draft.trunk
        n_siblings = rows.shape[1] - 1 - n_drafted
        path, following, rejected = self._verify(request, rows, draft)
        accepted = len(path)
        cache.length += 1 + accepted  # rejected K/V stays behind; the next verify overwrites it before anything reads it
        ctx.pending = rows.new_tensor([[following]])
        if draft is not None:
            request.sessions[by].verified(ctx, path)
            copied = 0 if draft.source is None else min(accepted, max(0, ctx.prompt - draft.source))
            stats.by_drafter[by].count(n_drafted, accepted, rejected, copied, n_siblings)
        if request.guard is not None:
            request.guard.passed(None if draft is None else by, n_drafted, accepted, n_siblings)

        verified_at = ended = perf_counter()
        verifying = verified_at - drafted_at - (stats.watching_seconds - watched)   # without what was shown to sessions meanwhile
        for session in request.watching:
            session.committed(ctx, path)
            began, ended = ended, perf_counter()
            stats.watched(ended - began, session.chooses)
        if draft is not None:
            stats.by_drafter[by].draft_seconds += drafted_at - started
            stats.by_drafter[by].verify_seconds += verifying
        stats.rounds += 1
        stats.drafted += n_drafted
        stats.accepted += accepted
        stats.rejecting_rounds += rejected
        stats.draft_seconds += drafted_at - started
        stats.verify_seconds += verifying
        stats.decode_seconds += ended - started
        emitted = rows[0].tolist() if path else []   # a GPU's host waits for each reading
        return [*(emitted[node] for node in path), following]

    def _verify(self, request: _Request, rows: Tensor, draft: Draft | None) -> tuple[Sequence[int], int, bool]:
        """The full model over the pending token and a draft, [1, 1 + N]; K/V of what stands then lie behind the committed ones.

        Returns (which drafted tokens stand, counted from 1, the token that follows them, whether the round ends in a rejection).
        """
        cache, planner = request.ctx.cache, request.ctx.planner
        if draft is None or draft.parents is None:
            logits = self._full(request, rows, resume=None if draft is None else draft.resume)[0]  # [1 + N, V]
            accepted, following = self._accept(request, rows[0, 1:], None if draft is None else draft.probs, logits)
            return range(1, 1 + accepted), following, accepted < rows.shape[1] - 1
        plan = planner.tree(cache.length, draft.parents)
        logits = self._pass(request, rows, plan, resume=draft.resume)[0]
        path, following = self._accept_tree(request, rows[0, 1:], draft, logits)
        cache.gather([cache.length + node for node in path], cache.length + 1)
        return path, following, ends_in_a_rejection(path, draft.parents)

    def _draft(self, request: _Request, room: int) -> tuple[int, Draft | None]:
        """(whose draft, the draft) of the first drafter that proposes something, of at most `room` tokens; (0, None) if none does."""
        for i, ((draft_length, _), session) in enumerate(zip(self.drafters, request.sessions, strict=True)):
            most = min(draft_length, room)
            if request.guard is not None and request.guard.rests(i):
                continue
            if most > 0 and (draft := session.draft(request.ctx, most)) is not None:
                # Passes of one fixed shape are chains, and so is what processors judge token by token.
                return i, draft.chain() if self.exact or request.steering is not None else draft
        return 0, None

    def _full(self, request: _Request, tokens: Tensor, last_only: bool = False, resume: Resume | None = None) -> Tensor:
        """The full model over tokens [1, T] behind what is committed. resume: dropped where passes have one fixed shape."""
        cache, planner = request.ctx.cache, request.ctx.planner
        if self.exact:
            watch = (lambda plan, rows: self._tap(request, plan, rows)) if request.watching else None
            return exact_forward(self.model, tokens, cache, planner, cache.length, last_only, watch)
        return self._pass(request, tokens, planner.chain(cache.length, tokens.shape[1]), last_only, resume)

    def _pass(self, request: _Request, tokens: Tensor, plan: PassPlan, last_only: bool = False, resume: Resume | None = None) -> Tensor:
        cache, tap = request.ctx.cache, self._tap(request, plan, tokens.shape[1])
        if resume is not None and len(request.watching) == 1:   # another one that watches wants to see the layers below, too
            return resumed(self.model, resume.hidden, resume.layer, tokens[:, resume.hidden.shape[1]:], cache, plan, tap)
        return forward(self.model, tokens, cache, plan, last_only=last_only, tap=tap)

    def _tap(self, request: _Request, plan: PassPlan, rows: int) -> Tap | None:
        """For all sessions that want to see this pass."""
        taps = [(tap, session.chooses) for session in request.watching
                if (tap := session.tap(self.model, request.ctx.cache, plan, rows)) is not None]
        return Shown(taps, request.stats) if taps else None

    def _accept(self, request: _Request, drafted: Tensor, q: Tensor | None, logits: Tensor) -> tuple[int, int]:
        if request.steering is not None:
            return request.steering.accept(drafted, q, logits, request.generator)
        picker = request.ctx.picker
        if isinstance(picker, SamplingPicker):
            return accept_sampled(drafted, q, picker.probs(logits), request.generator)
        return accept_greedy(drafted, logits)

    def _accept_tree(self, request: _Request, drafted: Tensor, draft: Draft, logits: Tensor) -> tuple[list[int], int]:
        assert draft.parents is not None
        picker = request.ctx.picker
        if isinstance(picker, SamplingPicker):
            return accept_tree_sampled(drafted, draft.parents, draft.probs, picker.probs(logits), request.generator)
        return accept_tree_greedy(drafted, draft.parents, logits)

    def _room_for(self, tokens: int) -> tuple[KVCache, Planner]:
        """The cache of the last request, emptied, or a larger one. A chain never ends past the last token that may come; siblings take
        slots behind it while their round lasts.

        It is lent until the request ends, so that another one that starts meanwhile takes its own.
        """
        slots = self._slots(tokens)
        try:
            cache, planner = self.spare.pop()  # in one step, so that no two threads take the same one
            if cache.capacity >= slots:
                cache.reset()
                return cache, planner
        except IndexError:
            pass
        return new_room(self.model, slots)

    def _slots(self, tokens: int) -> int:
        """Slots for so many tokens of prompt and answer, and for what a round takes behind them."""
        tokens += self._scratch
        # Rows that fill an exact pass up write behind the last token; a power of two from one block of keys on is whole blocks.
        return max(tokens + EXACT_ROWS - 1, EXACT_KEYS) if self.exact else tokens

    def _clock(self) -> float:
        synchronise(self.model.spec.device)
        return perf_counter()
