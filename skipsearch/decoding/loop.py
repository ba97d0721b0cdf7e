"""The decode loop: draft, verify, accept, commit; plain decoding if there is no drafter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from skipsearch.core.machine import synchronize
from skipsearch.core.recipe import Recipe
from skipsearch.core.stats import DecodeStats, DrafterCost, DrafterStats
from skipsearch.decoding.acceptor import MAX_FORCED, Acceptor, ForcedSession
from skipsearch.decoding.draft_models import load_draft_models
from skipsearch.decoding.guard import Guard
from skipsearch.decoding.prefix_cache import CacheSource, Lease, lend
from skipsearch.decoding.recurrent_limits import check_recurrent_limits
from skipsearch.decoding.request import PreparedRequest
from skipsearch.decoding.stopping import StopCondition
from skipsearch.decoding.tracing import Proposal, TapFanout, Trace
from skipsearch.decoding.trees import was_rejected
from skipsearch.drafters import DecodeContext, Draft, DraftSession, PartialPass
from skipsearch.drafters.lookup.answer_memory import AnswerMemory
from skipsearch.engine import (
    EXACT_KEY_BLOCK,
    EXACT_ROWS,
    LayerTap,
    forward,
    forward_exact,
    no_grad,
    resume_pass,
)
from skipsearch.engine.sampler import make_sampler
from skipsearch.models.adapter import ModelAdapter
from skipsearch.models.kv_cache import KVCache, PassPlan, round_slots

WHOLE_SLOTS = 4096  # a request without a session reserves up to this many slots at its start


@dataclass(frozen=True)
class Generation:
    """The answer to one request."""

    tokens: list[int]  # new token ids, an end-of-sequence token included
    finish_reason: str  # "eos", "length", "stop", "repeat", "loop" or "time"
    stats: DecodeStats
    text: str | None = None  # cut before a stop string; None: the model has no tokenizer

    @classmethod
    def from_chunks(cls, chunks: Iterable[Chunk]) -> Generation:
        """Join all chunks of one stream."""
        chunks = list(chunks)
        last = chunks[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        text = None if last.text is None else "".join(chunk.text or "" for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        return cls(tokens, last.finish_reason, last.stats, text)


@dataclass(frozen=True)
class Chunk:
    """The tokens that one round commits."""

    tokens: list[int]
    text: str | None  # text that no later token changes; None: the model has no tokenizer
    finish_reason: str | None = None  # set on the last chunk
    stats: DecodeStats | None = None  # set on the last chunk
    proposal: Proposal | None = None  # the round's draft, if the request is traced


@dataclass
class _Generating:
    """The state of one generation while it runs."""

    ctx: DecodeContext
    stop_condition: StopCondition
    acceptor: Acceptor
    guard: Guard | None  # None: drafters are never paused
    max_draft_tokens: int | None  # of a round; None: no limit of this request
    # One for each drafter of the recipe; then one for forced tokens, if the request has a
    # constraint.
    sessions: list[DraftSession] = field(default_factory=list)
    observers: list[DraftSession] = field(default_factory=list)  # of `sessions`, those that observe
    stats: DecodeStats = field(default_factory=DecodeStats)


class DecodeLoop:
    """A loop that decodes with one model and the drafters of one recipe.

    Any number of threads may stream from one loop at once.

    exact: all passes of the full model have the same shape, so their bits do not depend on the
    draft.
    drafter_costs: the costs of each drafter's rounds, for the guard. If the costs of a drafter are
    None, the guard never pauses it. module_folders: folders with trained modules. remember_tokens:
    number of tokens of earlier answers from which drafters may copy; 0: requests share nothing.
    draft_forced: the tokens that a request's constraint forces are drafted, before the recipe."""

    def __init__(
        self,
        model: ModelAdapter,
        recipe: Recipe,
        exact: bool = False,
        drafter_costs: Sequence[DrafterCost | None] = (),
        module_folders: Sequence[Path] = (),
        remember_tokens: int = 0,
        draft_forced: bool = True,
    ):
        self.model, self.exact, self.drafter_costs = model, exact, drafter_costs
        self.draft_forced = draft_forced
        self.answer_memory = AnswerMemory(remember_tokens) if remember_tokens else None
        self.draft_models = load_draft_models(recipe, model, module_folders)
        self.drafters = [
            (spec.draft_length, spec.build(model, module_folders)) for spec in recipe.drafters
        ]
        check_recurrent_limits(
            model.spec,
            [*zip(recipe.drafters, (built for _, built in self.drafters), strict=True)],
            exact,
        )
        self._scratch_slots = max((spec.scratch_slots for spec in recipe.drafters), default=0)
        self.idle_caches: list[KVCache] = []  # empty, or the cache of the last request that ended

    def stream(
        self,
        prepared: PreparedRequest,
        cache_source: CacheSource | None = None,
        trace: Trace | None = None,
        prompt_rows: int | None = None,
    ) -> Iterator[Chunk]:
        """Yield the committed tokens of each round. The first chunk is the prefill's single token.

        cache_source: lends the KV cache; None: use a cache of this loop. trace: records the
        proposals. prompt_rows: most tokens of the prompt that a pass reads; a chunk without tokens
        follows each pass but the last, so that others may run. None: one pass reads all."""
        with (cache_source or self).lease(
            prepared.prompt_ids,
            self._count_slots(len(prepared.prompt_ids) + prepared.stop_condition.max_new_tokens),
            self.model,
        ) as lease:
            yield from self._stream(prepared, lease, trace, prompt_rows)

    def _stream(
        self, prepared: PreparedRequest, lease: Lease, trace: Trace | None, prompt_rows: int | None
    ) -> Iterator[Chunk]:
        prompt, stop_condition = prepared.prompt_ids, prepared.stop_condition
        try:
            request = self._new_request(prepared, lease)
            n_unread = len(prompt) - lease.cache.length
            if prompt_rows is not None and n_unread > prompt_rows and self._can_read_parts():
                for _ in range((n_unread - 1) // prompt_rows):
                    self._read_prompt(request, prompt_rows)
                    yield Chunk([], "")
            first = self._prefill(request)
            if trace is not None:
                trace.chains_only = self.exact or prepared.processed_acceptance is not None
                request.sessions = [
                    trace.wrap_session(i, session) for i, session in enumerate(request.sessions)
                ]
            stats, emitted, lease.history = request.stats, [first], request.ctx.history
            while True:
                # Processors must not be called after the last token. With processors, the stop
                # condition was therefore checked at the acceptance of each token.
                committed = (
                    emitted
                    if prepared.processed_acceptance is not None
                    else stop_condition.cut(emitted)
                )
                reason = stop_condition.reason
                stats.tokens += len(committed)
                stats.round_tokens = stats.tokens - 1
                request.ctx.history.extend(committed)
                text = (
                    None
                    if stop_condition.detokenizer is None
                    else stop_condition.detokenizer.pop_text(last=reason is not None)
                )
                yield Chunk(
                    committed,
                    text,
                    reason,
                    stats if reason else None,
                    trace.pop_proposal() if trace is not None else None,
                )
                if reason:
                    return
                tokens_left = stop_condition.max_new_tokens - stop_condition.n_tokens
                emitted = self._run_round(request, tokens_left)
        finally:
            if self.answer_memory is not None and len(lease.history) > len(prompt):
                self.answer_memory.add(lease.history[len(prompt) :])

    def _can_read_parts(self) -> bool:
        """Return whether several passes may read a prompt: no drafter needs all of it in one."""
        sessions = [drafter.new_session() for _, drafter in self.drafters]
        return not self.model.spec.is_recurrent and all(
            session.observes_last_hidden_only for session in sessions if session.observes_hidden
        )

    def _new_request(self, prepared: PreparedRequest, lease: Lease) -> _Generating:
        """Return the state of a generation that has read no token of its prompt."""
        prompt, device = list(prepared.prompt_ids), self.model.spec.device
        generator = torch.Generator(device).manual_seed(prepared.seed)
        # An exact request has the same tokens alone and in a batch, which drafts step by step.
        sampler = make_sampler(prepared.sampling, generator, engine_draws=not self.exact)
        request = _Generating(
            DecodeContext(
                self.model,
                lease.cache,
                lease.planner,
                torch.tensor([prompt[-1:]], device=device),
                prompt,
                len(prompt),
                sampler,
                self.answer_memory,
            ),
            prepared.stop_condition,
            Acceptor(
                sampler,
                generator,
                prepared.stop_condition,
                prepared.processed_acceptance,
                prepared.constraint,
            ),
            Guard(self.drafter_costs) if any(self.drafter_costs) else None,
            prepared.max_draft_tokens,
        )
        request.sessions = [drafter.new_session() for _, drafter in self.drafters]
        request.observers = [s for s in request.sessions if s.observes_hidden]
        request.stats.prompt_tokens = len(prompt)
        request.stats.cached_tokens = lease.cache.length  # whose K/V is cached
        if prepared.constraint is not None and self.draft_forced:
            lengths = [draft_length for draft_length, _ in self.drafters]
            pairs = list(zip(lengths, request.sessions, strict=True))
            request.sessions.append(ForcedSession(prepared.constraint.matcher, pairs))
        request.stats.by_drafter = [DrafterStats() for _ in request.sessions]
        return request

    @no_grad
    def _read_prompt(self, request: _Generating, n_rows: int) -> Tensor:
        """Run a pass over the next tokens of the prompt; return the logits after them, [1, V]."""
        ctx, stats = request.ctx, request.stats
        started, observed_before = self._read_clock(), stats.watching_seconds
        tokens = ctx.history[ctx.cache.length :][:n_rows]
        logits = self._run_full_model(request, ctx.pending.new_tensor([tokens]), last_only=True)[0]
        ctx.cache.length += len(tokens)
        observe_seconds = stats.watching_seconds - observed_before
        stats.prefill_seconds += self._read_clock() - started - observe_seconds
        return logits

    @no_grad
    def _prefill(self, request: _Generating) -> int:
        """Read the rest of the prompt, choose the first token and begin the draft sessions.

        Returns the first token.
        """
        ctx, stats = request.ctx, request.stats
        logits = self._read_prompt(request, len(ctx.history))
        started, observed_before = self._read_clock(), stats.watching_seconds
        _, token = request.acceptor.accept(ctx.pending[0, :0], None, logits)
        ctx.pending = ctx.pending.new_tensor([[token]])
        for session in request.sessions:
            began = self._read_clock()
            session.begin(ctx)
            if session.observes_hidden:
                stats.add_observing_time(self._read_clock() - began, session.selects_mask)
        observe_seconds = stats.watching_seconds - observed_before
        stats.prefill_seconds += self._read_clock() - started - observe_seconds
        # The time of observers in the prefill counts as drafting, because plain decoding has none.
        stats.decode_seconds = stats.watching_seconds
        return token

    @no_grad
    def _run_round(self, request: _Generating, token_budget: int) -> list[int]:
        """Run one round: draft, verify, accept and commit.

        Returns the accepted tokens and the full model's next token; together at most
        `token_budget`.
        """
        ctx, stats = request.ctx, request.stats
        started = perf_counter()
        drafter_index, draft = self._propose(request, token_budget - 1)
        # [1, 1 + N]
        rows = ctx.pending if draft is None else torch.cat([ctx.pending, draft.tokens[None]], dim=1)
        drafted_at, observed_before = perf_counter(), stats.watching_seconds

        accepted_nodes, next_token, rejected = self._verify(request, rows, draft)
        # K/V of rejected tokens stay in the slots after `length`. The next verify pass overwrites
        # them before they are read.
        ctx.cache.length += 1 + len(accepted_nodes)
        ctx.pending = rows.new_tensor([[next_token]])
        if draft is not None:
            own = draft.own_nodes
            request.sessions[drafter_index].verified(
                ctx, accepted_nodes if own is None else [own[node - 1] for node in accepted_nodes]
            )

        verified_at = ended = perf_counter()
        # Observers read hidden states during the pass; `stats` counts their time separately.
        observe_seconds = stats.watching_seconds - observed_before
        for session in request.observers:
            session.committed(ctx, accepted_nodes)
            began, ended = ended, perf_counter()
            stats.add_observing_time(ended - began, session.selects_mask)
        stats.decode_seconds += ended - started
        self._count_round(
            request,
            drafter_index,
            draft,
            len(accepted_nodes),
            rejected,
            drafted_at - started,
            verified_at - drafted_at - observe_seconds,
        )
        # Copy from the device only if a token was accepted: each copy makes the host wait for the
        # GPU.
        row_tokens = rows[0].tolist() if accepted_nodes else []
        return [*(row_tokens[node] for node in accepted_nodes), next_token]

    def _count_round(
        self,
        request: _Generating,
        drafter_index: int,
        draft: Draft | None,
        n_accepted: int,
        rejected: bool,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Add one round to the counters of the request, of its drafter and of the guard."""
        stats = request.stats
        n_drafted = 0 if draft is None else draft.depth
        n_siblings = 0 if draft is None else len(draft.tokens) - n_drafted
        if draft is not None:
            n_copied = 0
            if draft.copied_from is not None:
                prompt_rest = max(0, request.ctx.prompt_length - draft.copied_from)
                n_copied = min(n_accepted, prompt_rest)
            drafter_stats = stats.by_drafter[drafter_index]
            drafter_stats.add_round(n_drafted, n_accepted, rejected, n_copied, n_siblings)
            drafter_stats.draft_seconds += draft_seconds
            drafter_stats.verify_seconds += verify_seconds
        if request.guard is not None:
            request.guard.record_round(
                None if draft is None else drafter_index, n_drafted, n_accepted, n_siblings
            )
        stats.rounds += 1
        stats.drafted += n_drafted
        stats.accepted += n_accepted
        stats.rejecting_rounds += rejected
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += verify_seconds

    def _verify(
        self, request: _Generating, rows: Tensor, draft: Draft | None
    ) -> tuple[Sequence[int], int, bool]:
        """Run the full model over the pending token and a draft, `rows` [1, 1 + N].

        Afterwards, the K/V of the accepted tokens are in the slots after the committed ones.
        Returns (accepted nodes, counted from 1; the token after them; whether a draft token was
        rejected)."""
        cache, planner = request.ctx.cache, request.ctx.planner
        if draft is None or draft.parents is None:
            logits = self._run_full_model(
                request, rows, partial_pass=None if draft is None else draft.partial_pass
            )[0]  # [1 + N, V]
            n_accepted, next_token = request.acceptor.accept(
                rows[0, 1:], None if draft is None else draft.probs, logits
            )
            rejected = n_accepted < rows.shape[1] - 1
            if rejected and request.acceptor.processed is not None:
                # An accepted draft token that ends the generation is also returned as `next_token`.
                rejected = next_token != int(rows[0, 1 + n_accepted])
            return range(1, 1 + n_accepted), next_token, rejected
        plan = planner.plan_tree(cache.length, draft.parents)
        logits = self._run_pass(request, rows, plan, partial_pass=draft.partial_pass)[0]
        accepted_nodes, next_token = request.acceptor.accept_tree(rows[0, 1:], draft, logits)
        cache.compact([cache.length + node for node in accepted_nodes], cache.length + 1)
        return accepted_nodes, next_token, was_rejected(accepted_nodes, draft.parents)

    def _propose(self, request: _Generating, token_budget: int) -> tuple[int, Draft | None]:
        """Return (drafter index, draft) of the first drafter that proposes anything.

        The draft has at most `token_budget` tokens. (0, None): no drafter proposes anything.
        """
        if request.max_draft_tokens is not None:
            token_budget = min(token_budget, request.max_draft_tokens)
        chains_only = self.exact or request.acceptor.processed is not None
        n = len(self.drafters)
        lengths = [*(draft_length for draft_length, _ in self.drafters), MAX_FORCED]
        order = [n, *range(n)] if len(request.sessions) > n else range(n)  # forced tokens first
        for i in order:
            draft_length, session = lengths[i], request.sessions[i]
            max_tokens = min(draft_length, token_budget)
            if request.guard is not None and request.guard.is_paused(i):
                continue
            if max_tokens > 0 and (draft := session.draft(request.ctx, max_tokens)) is not None:
                # Passes of one fixed shape can only verify chains, and processors read only one
                # text.
                draft = request.acceptor.cut(draft.main_path() if chains_only else draft)
                if draft is not None:
                    return i, draft
                session.verified(request.ctx, ())
        return 0, None

    def _run_full_model(
        self,
        request: _Generating,
        tokens: Tensor,
        last_only: bool = False,
        partial_pass: PartialPass | None = None,
    ) -> Tensor:
        """Run the full model over tokens [1, T] after the committed ones.

        partial_pass: ignored if all passes have the same shape. Returns logits, [1, T, V] or [1,
        V]."""
        cache, planner = request.ctx.cache, request.ctx.planner
        if self.exact:
            make_tap = (
                (lambda plan, rows: self._make_observer_tap(request, plan, rows))
                if request.observers
                else None
            )
            return forward_exact(
                self.model, tokens, cache, planner, cache.length, last_only, make_tap
            )
        return self._run_pass(
            request,
            tokens,
            planner.plan_chain(cache.length, tokens.shape[1]),
            last_only,
            partial_pass,
        )

    def _run_pass(
        self,
        request: _Generating,
        tokens: Tensor,
        plan: PassPlan,
        last_only: bool = False,
        partial_pass: PartialPass | None = None,
    ) -> Tensor:
        cache, tap = request.ctx.cache, self._make_observer_tap(request, plan, tokens.shape[1])
        # A resumed pass runs only the upper layers, but a second observer needs all layers.
        if partial_pass is not None and len(request.observers) == 1:
            return resume_pass(
                self.model,
                partial_pass.hidden,
                partial_pass.next_layer,
                tokens[:, partial_pass.hidden.shape[1] :],
                cache,
                plan,
                tap,
            )
        return forward(self.model, tokens, cache, plan, last_only=last_only, tap=tap)

    def _make_observer_tap(
        self, request: _Generating, plan: PassPlan, n_rows: int
    ) -> LayerTap | None:
        """Return a tap for all sessions that observe this pass; None if no session does."""
        taps = [
            (tap, session.selects_mask)
            for session in request.observers
            if (tap := session.tap(self.model, request.ctx.cache, plan, n_rows)) is not None
        ]
        return TapFanout(taps, request.stats) if taps else None

    @contextmanager
    def lease(self, prompt: Sequence[int], slots: int, model: ModelAdapter) -> Iterator[Lease]:
        """Lend the emptied cache of the last request. If it is in use, lend a new cache.

        If a cache has at most WHOLE_SLOTS slots, it reserves all of them at once, because engines
        capture passes over its buffers. After an error, the cache is dropped.
        """
        try:
            cache = self.idle_caches.pop()  # atomic, so two threads cannot take the same cache
            cache.reset()
        except IndexError:
            cache = model.new_cache(1, round_slots(1))
        idle_caches = [cache]
        try:
            yield lend(cache, prompt, min(slots, max(len(prompt), WHOLE_SLOTS)), slots, model)
        except Exception:
            idle_caches = []
            raise
        finally:
            self.idle_caches = idle_caches

    def _count_slots(self, n_tokens: int) -> int:
        """Return the number of cache slots for a request.

        n_tokens: the most tokens that prompt and answer can have. A chain stays within them.
        Siblings and passes that choose a mask need slots after them (`scratch_slots`).
        """
        n_tokens += self._scratch_slots
        # Padding rows of an exact pass write to slots after the last token. Slots are rounded up to
        # a power of two; from one key block on, it is a multiple of the key block.
        return max(n_tokens + EXACT_ROWS - 1, EXACT_KEY_BLOCK) if self.exact else n_tokens

    def _read_clock(self) -> float:
        synchronize(self.model.spec.device)
        return perf_counter()
