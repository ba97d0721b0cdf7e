"""Mistakes that decoders of this kind have been shipped with, planted into the real code one at a time.

Each is a context manager. `BUGS` names the check that has to fail while it lasts; all checks pass without it.
To add one: a context manager under @caught_by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from helpers.tiny import small_world
from torch import Tensor

from skipsearch import programme
from skipsearch.cache import KVCache, PassPlan, Planner
from skipsearch.decoding import acceptance, loop, trees
from skipsearch.decoding.guard import Guard
from skipsearch.decoding.loop import DecodeLoop
from skipsearch.decoding.prefix import Prefix, new_room
from skipsearch.decoding.sampling import SamplingPicker
from skipsearch.decoding.steering import Steering
from skipsearch.decoding.stopping import Stopper, TextStream
from skipsearch.drafters import DecodeContext, Draft, s3d
from skipsearch.drafters.adapted import AdaptedDrafter, AdaptedSession
from skipsearch.drafters.asd import ASD, PromptCosines
from skipsearch.drafters.choosing import ChoosingSession
from skipsearch.drafters.clasp import LastToken
from skipsearch.drafters.kangaroo import KangarooSession, ResumingSession
from skipsearch.drafters.lookup import LookupDrafter, LookupSession
from skipsearch.drafters.memory import Memory
from skipsearch.drafters.skip import SkipSession
from skipsearch.drafters.suffixes import Match, SuffixIndex
from skipsearch.drafters.swift import OnTheFly
from skipsearch.engine import Scored, forward
from skipsearch.models.recurrent import RecurrentCache, Standing
from skipsearch.modules.kangaroo import Shallow
from skipsearch.modules.s3d import Simultaneous

from . import tree_checks
from .acceptance_checks import check_acceptance
from .adapted_checks import check_adapted, check_adapted_drafts
from .checks import MASKS, Drafting, check_endings, check_greedy, check_streams_side_by_side
from .choosing_checks import check_asd, check_choosing, check_clasp, check_swift, check_swift_as_published
from .count_checks import check_counts
from .kangaroo_checks import check_kangaroo_drafts, check_kangaroo_passes, check_kangaroo_siblings
from .prefix_checks import check_growing, check_prefixes
from .recipe_checks import check_certain_sampling, check_guard, check_lookup, check_memory
from .recurrent_checks import check_growing_recurrent, check_recurrent
from .s3d_checks import check_s3d_drafts, check_s3d_tree_sampling, check_s3d_trees
from .sampling_checks import Warp, check_sampling
from .steering_checks import check_steering
from .tree_checks import check_tree_acceptance, check_tree_sampling, check_trees

Check = Callable[[], object]
BUGS: dict[str, tuple[Callable[[], AbstractContextManager[None]], Check]] = {}


def check_sampling_of_likely_tokens() -> None:
    check_sampling(Warp(0.7, top_p=0.8, top_k=3))


def check_greedy_on_padded_passes() -> None:
    """A pass may look at a whole block of slots, hidden ones and never written ones among them, and change nothing."""
    world = small_world()   # loaded as ever: the check at load plans its passes itself
    with padded_passes():
        check_greedy([Drafting(MASKS[0])], world=world)


def caught_by(check: Check) -> Callable[[Callable[[], Iterator[None]]], Callable[[], AbstractContextManager[None]]]:
    def register(plant: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
        manager = contextmanager(plant)
        BUGS[plant.__name__] = (manager, check)
        return manager

    return register


# --- the cache ---------------------------------------------------------------------------------------------------------------


@contextmanager
def padded_passes() -> Iterator[None]:
    """No bug: an engine with fixed shapes shows every pass a multiple of 64 slots and masks what it must not see."""
    def chain(self: Planner, start: int, tokens: int, batch: int = 1) -> PassPlan:
        slots = self.slots[:, start:start + tokens].expand(batch, tokens)
        keys = -(-(start + tokens) // 64) * 64
        visible = (self.slots[:, :keys] <= slots[0][:, None])[None, None]
        return PassPlan(slots, slots, keys, visible, start)

    with patch.object(Planner, "chain", chain):
        yield


@caught_by(check_greedy_on_padded_passes)
def nan_left_in_an_unwritten_slot() -> Iterator[None]:
    """Buffers from torch.empty: what no pass has written may be NaN, and a masked NaN is still a NaN."""
    real = KVCache.write

    def write(self: KVCache, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is None:
            shape = (self.batch, key.shape[1], self.capacity, key.shape[-1])
            self.keys[layer], self.values[layer] = key.new_full(shape, torch.nan), value.new_full(shape, torch.nan)
        return real(self, layer, key, value, plan)

    with patch.object(KVCache, "write", write):
        yield


@caught_by(check_greedy)
def stale_kv_at_accepted_positions() -> Iterator[None]:
    """The verify pass does not overwrite what the draft wrote: accepted tokens keep the draft's K/V."""
    real = KVCache.write

    def write(self: KVCache, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        buffers = self.keys[layer], self.values[layer]
        slots = plan.slots[0]
        is_verify = len(slots) > 1 and int(slots[0]) > 0
        drafted = [b[:, :, slots[:-1]].clone() for b in buffers if b is not None] if is_verify else []
        seen = tuple(t.clone() for t in real(self, layer, key, value, plan))
        for buffer, old in zip(buffers, drafted, strict=False):
            assert buffer is not None
            if bool(old.any()):
                buffer[:, :, slots[:-1]] = old
        return seen[0], seen[1]

    with patch.object(KVCache, "write", write):
        yield


@caught_by(check_greedy)
def full_model_kv_missing() -> Iterator[None]:
    """The verify pass leaves no K/V behind in the attention layers that the draft skips."""
    real = KVCache.write

    def write(self: KVCache, layer: int, key: Tensor, value: Tensor, plan: PassPlan) -> tuple[Tensor, Tensor]:
        keys, values = (t.clone() for t in real(self, layer, key, value, plan))
        if key.shape[2] > 1 and int(plan.slots[0, 0]) > 0 and layer in MASKS[0].attn:
            for buffer in (self.keys[layer], self.values[layer]):
                assert buffer is not None
                buffer[:, :, plan.slots[0]] = 0
        return keys, values

    with patch.object(KVCache, "write", write):
        yield


@caught_by(check_greedy)
def length_advanced_past_what_stands() -> Iterator[None]:
    """The bonus token counts as committed, but nobody has written its K/V yet."""
    real = loop.DecodeLoop._round

    def advanced(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        tokens = real(self, request, room)
        request.ctx.cache.length += len(tokens) > 1
        return tokens

    with patch.object(loop.DecodeLoop, "_round", advanced):
        yield


@caught_by(check_greedy)
def rejected_tokens_stay_visible() -> Iterator[None]:
    """The cache is not rolled back: length moves over every verified token, rejected ones included."""
    real = loop.DecodeLoop._round

    def kept(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        before, drafted = request.ctx.cache.length, request.stats.drafted
        tokens = real(self, request, room)
        request.ctx.cache.length = before + 1 + request.stats.drafted - drafted
        return tokens

    with patch.object(loop.DecodeLoop, "_round", kept):
        yield


@caught_by(check_streams_side_by_side)
def one_cache_for_two_streams() -> Iterator[None]:
    real = loop.DecodeLoop._room_for

    def shared(self: loop.DecodeLoop, tokens: int) -> tuple[KVCache, Planner]:
        lent = real(self, tokens)
        self._spare.append(lent)
        return lent

    with patch.object(loop.DecodeLoop, "_room_for", shared):
        yield


# --- processed logits ----------------------------------------------------------------------------------------------------------------


@caught_by(check_steering)
def processors_asked_about_rejected_tokens() -> Iterator[None]:
    """All rows of a verify pass are processed at once, behind drafts that may fall."""
    real = Steering.accept

    def accept(self: Steering, drafted: Tensor, q: Tensor | None, logits: Tensor, generator: torch.Generator) -> tuple[int, int]:
        length = self._length
        for token, row in zip(drafted.tolist(), logits, strict=False):
            self._processed(row)
            self._ids[0, self._length] = token
            self._length += 1
        self._length = length
        return real(self, drafted, q, logits, generator)

    with patch.object(Steering, "accept", accept):
        yield


@caught_by(check_steering)
def drafts_judged_by_unprocessed_logits() -> Iterator[None]:
    real = Steering._judged

    def judged(self: Steering, proposed: int, token: Tensor, q: Tensor | None, logits: Tensor,
               generator: torch.Generator) -> tuple[int, bool]:
        chosen, stands = real(self, proposed, token, q, logits, generator)
        return (proposed, True) if int(logits.argmax()) == proposed else (chosen, stands)

    with patch.object(Steering, "_judged", judged):
        yield


# --- what one request leaves to the next --------------------------------------------------------------------------------------------


@caught_by(check_prefixes)
def stale_tail_of_a_session() -> Iterator[None]:
    """What stood behind the shared tokens still counts as known, though another text follows them now."""
    with patch.object(Prefix, "shared", lambda self, prompt: min(len(self.tokens), len(prompt) - 1)):
        yield


@caught_by(check_prefixes)
def drafted_tokens_kept_by_a_session() -> Iterator[None]:
    """A session stands for more than what was emitted: the token that is still pending has no K/V."""
    real = Prefix.give_back

    def give_back(self: Prefix, history: Sequence[int]) -> None:
        assert self._room is not None
        self._room[0].length = len(history)
        real(self, history)

    with patch.object(Prefix, "give_back", give_back):
        yield


@caught_by(check_prefixes)
def another_sessions_prefix() -> Iterator[None]:
    """The K/V of all sessions lies in one cache, while each remembers its own tokens."""
    room: list[tuple[KVCache, Planner]] = []
    real = Prefix.lend

    def lend(self: Prefix, prompt: Sequence[int], slots: int, model: Any) -> tuple[KVCache, Planner]:
        room.extend([new_room(model, 512)] if not room else [])
        self._room = room[0]
        return real(self, prompt, slots, model)

    with patch.object(Prefix, "lend", lend):
        yield


@caught_by(check_growing)
def a_larger_cache_without_what_was_known() -> Iterator[None]:
    with patch.object(KVCache, "take_over", lambda self, other, count: None):
        yield


# --- the end of a generation -------------------------------------------------------------------------------------------------


@caught_by(check_greedy)
def one_token_too_many() -> Iterator[None]:
    real = Stopper.push

    def push(self: Stopper, token: int) -> str | None:
        reason = real(self, token)
        return None if reason == "length" and self.n_tokens == self.max_new_tokens else reason

    with patch.object(Stopper, "push", push):
        yield


@caught_by(check_endings)
def eos_inside_a_round_does_not_cut_it() -> Iterator[None]:
    """The end is looked for, but only after a whole round has been emitted."""
    left = [1]   # tokens of the round that are still to be pushed; the prefill's own is a round of one
    reasons: list[str] = []
    real_push, real_round, real_prefill = Stopper.push, loop.DecodeLoop._round, loop.DecodeLoop._prefill

    def prefill(self: loop.DecodeLoop, *args: Any) -> Any:
        left[0] = 1
        reasons.clear()
        return real_prefill(self, *args)

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        tokens = real_round(self, request, room)
        left[0] = len(tokens)
        return tokens

    def push(self: Stopper, token: int) -> str | None:
        left[0] -= 1
        if reason := real_push(self, token):
            reasons.append(reason)
        return reasons[0] if reasons and not left[0] else None

    with patch.object(Stopper, "push", push), patch.object(loop.DecodeLoop, "_round", rounds), \
            patch.object(loop.DecodeLoop, "_prefill", prefill):
        yield


@caught_by(check_endings)
def stop_string_sought_in_the_last_token_only() -> Iterator[None]:
    real = TextStream.push

    def push(self: TextStream, token: int) -> bool:
        real(self, token)
        return any(s in self.tokenizer.decode([token]) for s in self.stop)

    with patch.object(TextStream, "push", push):
        yield


@caught_by(check_endings)
def half_a_character_shown() -> Iterator[None]:
    def push(self: TextStream, token: int) -> bool:
        self.tokens.append(token)
        self.held += self.tokenizer.decode([token], skip_special_tokens=True)
        return any(s in self.held for s in self.stop)

    with patch.object(TextStream, "push", push):
        yield


@caught_by(check_endings)
def start_of_a_stop_string_shown() -> Iterator[None]:
    real = TextStream.take

    def take(self: TextStream, last: bool = False) -> str:
        if last:
            return real(self, last)
        text, self.held = self.held, ""
        return text

    with patch.object(TextStream, "take", take):
        yield


# --- acceptance --------------------------------------------------------------------------------------------------------------


@caught_by(check_greedy)
def first_wrong_token_accepted() -> Iterator[None]:
    def accept(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        accepted, _ = acceptance.accept_greedy(drafted, logits)
        accepted = min(accepted + 1, len(drafted))
        return accepted, int(logits[accepted].argmax())

    with patch.object(loop, "accept_greedy", accept):
        yield


@caught_by(check_greedy)
def correction_read_from_the_row_behind() -> Iterator[None]:
    def accept(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        accepted, _ = acceptance.accept_greedy(drafted, logits)
        return accepted, int(logits[-1].argmax())

    with patch.object(loop, "accept_greedy", accept):
        yield


def _swapped(drafted: Tensor, q: Tensor | None, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
    n = len(drafted)
    px = p[:n].gather(1, drafted[:, None])[:, 0]
    qx = torch.ones_like(px) if q is None else q.gather(1, drafted[:, None])[:, 0]
    u = torch.rand(n, generator=generator, dtype=p.dtype)
    accepted = int((u * px < qx).long().cumprod(dim=0).sum())
    weights = p[n] if accepted == n else acceptance.residual(p[accepted], None if q is None else q[accepted], drafted[accepted])
    return accepted, int(torch.multinomial(weights, 1, generator=generator))


@caught_by(check_sampling)
def p_and_q_swapped() -> Iterator[None]:
    with patch.object(loop, "accept_sampled", _swapped), patch.object(acceptance, "accept_sampled", _swapped):
        yield


@caught_by(check_acceptance)
def p_and_q_swapped_in_the_rule_alone() -> Iterator[None]:
    with patch.object(acceptance, "accept_sampled", _swapped):
        yield


@caught_by(check_acceptance)
def residual_not_renormalised() -> Iterator[None]:
    """torch.multinomial forgives it; any other way to draw would not, so it is the rule's own check that has to see it."""
    def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
        if q is None:
            q = torch.zeros_like(p)
            q[token] = 1
        left = (p - q).clamp(min=0)
        return left if bool(left.sum() > 0) else p

    with patch.object(acceptance, "residual", residual):
        yield


@caught_by(check_sampling)
def residual_replaced_by_p() -> Iterator[None]:
    with patch.object(acceptance, "residual", lambda p, q, token: p):
        yield


@caught_by(check_acceptance)
def residual_keeps_the_certain_token() -> Iterator[None]:
    """A one-hot draft is handled as if it had no distribution at all."""
    real = acceptance.residual
    with patch.object(acceptance, "residual", lambda p, q, token: p if q is None else real(p, q, token)):
        yield


@caught_by(check_sampling)
def greedy_draft_entered_as_its_softmax() -> Iterator[None]:
    real = SkipSession.draft

    class Greedy(SamplingPicker):
        def __init__(self, inner: SamplingPicker):
            self.key, self.generator, self.warpers = inner.key, inner.generator, inner.warpers

        def draw(self, scored: Scored) -> tuple[Tensor, Tensor | None]:
            return scored.weights.argmax(dim=-1, keepdim=True), scored.weights

    def draft(self: SkipSession, ctx: DecodeContext, most: int) -> Draft | None:
        assert isinstance(ctx.picker, SamplingPicker)
        return real(self, replace(ctx, picker=Greedy(ctx.picker)), most)

    with patch.object(SkipSession, "draft", draft):
        yield


@caught_by(check_sampling)
def bonus_token_without_temperature() -> Iterator[None]:
    real = SamplingPicker.probs

    def probs(self: SamplingPicker, logits: Tensor) -> Tensor:
        warped = real(self, logits)
        if len(logits) > 1:   # a verify pass
            warped[-1] = logits[-1].softmax(dim=-1)
        return warped

    with patch.object(SamplingPicker, "probs", probs):
        yield


@caught_by(check_sampling)
def draft_judged_at_another_temperature() -> Iterator[None]:
    real = SamplingPicker.draw

    def draw(self: SamplingPicker, scored: Scored) -> tuple[Tensor, Tensor | None]:
        hotter = scored.weights**0.5
        return real(self, scored)[0], hotter / hotter.sum(dim=-1, keepdim=True)

    with patch.object(SamplingPicker, "draw", draw):
        yield


@caught_by(check_sampling_of_likely_tokens)
def top_p_and_top_k_left_out_of_the_verify_pass() -> Iterator[None]:
    real = SamplingPicker.probs

    def probs(self: SamplingPicker, logits: Tensor) -> Tensor:
        return (logits / 0.7).softmax(dim=-1) if len(logits) > 1 else real(self, logits)

    with patch.object(SamplingPicker, "probs", probs):
        yield


# --- drafting and counting ---------------------------------------------------------------------------------------------------


@caught_by(check_counts)
def low_confidence_token_dropped_instead_of_verified() -> Iterator[None]:
    def draft(self: SkipSession, ctx: DecodeContext, most: int) -> Draft | None:
        token, tokens = ctx.pending, [ctx.pending[:, :0]]
        for n in range(most):
            plan = ctx.planner.chain(ctx.cache.length + n, 1)
            logits = forward(ctx.model, token, ctx.cache, plan, self.skipped)[:, -1]
            scored = ctx.picker.score(logits, confidence=True)
            token, _ = ctx.picker.draw(scored)
            assert scored.confidence is not None
            if self.exit.stop(float(scored.confidence), n + 1):
                break
            tokens.append(token)
        self._drafted = len(tokens) - 1
        return Draft(torch.cat(tokens, dim=1)[0]) if self._drafted else None

    with patch.object(SkipSession, "draft", draft):
        yield


@caught_by(check_counts)
def policy_told_that_the_bonus_was_accepted() -> Iterator[None]:
    def verified(self: SkipSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.exit.observe(len(path) + 1, self._drafted)

    with patch.object(SkipSession, "verified", verified):
        yield


@caught_by(check_counts)
def policy_told_the_draft_length_instead_of_the_draft() -> Iterator[None]:
    def verified(self: SkipSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        self.exit.observe(len(path), 4)

    with patch.object(SkipSession, "verified", verified):
        yield


@caught_by(check_counts)
def bonus_counted_as_accepted() -> Iterator[None]:
    real = loop.DecodeLoop._round

    def counted(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        request.stats.accepted += 1
        return real(self, request, room)

    with patch.object(loop.DecodeLoop, "_round", counted):
        yield


# --- recipes -----------------------------------------------------------------------------------------------------------------


@caught_by(check_lookup)
def lookup_one_place_off() -> Iterator[None]:
    """What is proposed starts one token behind the one that followed the match."""
    real = SuffixIndex.match

    def match(self: SuffixIndex) -> Match | None:
        found = real(self)
        return None if found is None else Match(found.length, min(found.position + 1, len(self) - 1))

    with patch.object(SuffixIndex, "match", match):
        yield


@caught_by(check_lookup)
def lookup_across_requests() -> Iterator[None]:
    """One index for all requests of a drafter: what one user wrote speeds up, and so betrays itself to, another."""
    real = LookupDrafter.begin

    def begin(self: LookupDrafter, ctx: DecodeContext) -> Any:
        session = real(self, ctx)
        kept = self.__dict__.setdefault("kept", session)
        kept.index.extend(ctx.history)
        session.index = kept.index
        return session

    with patch.object(LookupDrafter, "begin", begin):
        yield


@caught_by(check_lookup)
def answers_remembered_unasked() -> Iterator[None]:
    """Every decoder keeps a memory: one user's answers speed up another's requests."""
    real = DecodeLoop.__init__

    def init(self: DecodeLoop, *args: Any) -> None:
        real(self, *args)
        self.memory = Memory(1000)

    with patch.object(DecodeLoop, "__init__", init):
        yield


@caught_by(check_memory)
def memory_reaches_into_the_next_answer() -> Iterator[None]:
    """Nothing stands between two answers of the memory."""
    def add(self: Memory, answer: Sequence[int]) -> None:
        self._index.extend(answer)

    with patch.object(Memory, "add", add):
        yield


@caught_by(check_lookup)
def pending_token_not_looked_up() -> Iterator[None]:
    """The index lags one token behind the text, so what it proposes belongs one place earlier."""
    real = LookupSession.draft

    def draft(self: LookupSession, ctx: DecodeContext, most: int) -> Draft | None:
        return real(self, replace(ctx, history=ctx.history[:-1]), most)

    with patch.object(LookupSession, "draft", draft):
        yield


@caught_by(check_lookup)
def rejected_tokens_enter_the_index() -> Iterator[None]:
    real = LookupSession.draft

    def draft(self: LookupSession, ctx: DecodeContext, most: int) -> Draft | None:
        found = real(self, ctx, most)
        if found is not None:
            self.index.extend(found.tokens.tolist())
        return found

    with patch.object(LookupSession, "draft", draft):
        yield


@caught_by(check_greedy)
def guard_that_loses_a_token() -> Iterator[None]:
    """While a drafter rests, its round is left out instead of being a plain one."""
    real = loop.DecodeLoop._round

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        tokens = real(self, request, room)
        resting = request.guard is not None and request.guard.rests(0)
        return tokens if not resting else tokens[1:] or tokens + tokens

    with patch.object(loop.DecodeLoop, "_round", rounds):
        yield


@caught_by(check_guard)
def guard_shared_by_requests() -> Iterator[None]:
    """What one request taught the guard is held against the next one."""
    kept: list[Guard] = []

    def guard(prices: Any) -> Guard:
        kept.append(kept[0] if kept else Guard(prices))
        return kept[-1]

    with patch.object(loop, "Guard", guard):
        yield


@caught_by(check_guard)
def guard_told_of_nobody() -> Iterator[None]:
    """Rounds are weighed as if nobody had drafted, so nobody ever rests."""
    real = Guard.passed

    def passed(self: Guard, drafter: int | None, drafted: int = 0, accepted: int = 0, siblings: int = 0) -> None:
        real(self, None)

    with patch.object(Guard, "passed", passed):
        yield


@caught_by(check_certain_sampling)
def certain_token_kept_whatever_its_chance() -> Iterator[None]:
    """A looked-up token counts as drawn from p itself, so it always stands."""
    real = acceptance.accept_sampled

    def accept(drafted: Tensor, q: Tensor | None, p: Tensor, generator: torch.Generator) -> tuple[int, int]:
        if q is not None or not len(drafted):
            return real(drafted, q, p, generator)
        return len(drafted), int(torch.multinomial(p[len(drafted)], 1, generator=generator))

    with patch.object(loop, "accept_sampled", accept):
        yield


# --- trees -------------------------------------------------------------------------------------------------------------------


@caught_by(check_trees)
def sibling_sees_its_sibling() -> Iterator[None]:
    """A verify pass over a tree shows every row all rows before it, as in a chain."""
    real = Planner.tree

    def tree(self: Planner, start: int, parents: Sequence[int]) -> PassPlan:
        plan = real(self, start, parents)
        return replace(plan, visible=(self.slots[:, :plan.keys] <= plan.slots[0, :, None])[None, None])

    with patch.object(Planner, "tree", tree):
        yield


@caught_by(check_trees)
def sibling_stands_where_its_slot_is() -> Iterator[None]:
    """Positions count rows, so a sibling is turned by the angle of another place."""
    real = Planner.tree

    def tree(self: Planner, start: int, parents: Sequence[int]) -> PassPlan:
        plan = real(self, start, parents)
        return replace(plan, positions=plan.slots)

    with patch.object(Planner, "tree", tree):
        yield


@caught_by(check_trees)
def path_not_moved() -> Iterator[None]:
    """The K/V of an accepted sibling stay where the tree had them."""
    with patch.object(KVCache, "gather", lambda self, slots, start: None):
        yield


@caught_by(check_trees)
def length_advanced_by_rows() -> Iterator[None]:
    """Siblings that fell count as committed."""
    real = loop.DecodeLoop._round

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        before = sum(d.siblings for d in request.stats.by_drafter)
        tokens = real(self, request, room)
        request.ctx.cache.length += sum(d.siblings for d in request.stats.by_drafter) - before
        return tokens

    with patch.object(loop.DecodeLoop, "_round", rounds):
        yield


@caught_by(check_trees)
def any_sibling_of_a_right_token_stands() -> Iterator[None]:
    """The descent takes the last child whenever one of the children is right."""
    real = trees.accept_tree_greedy

    def accept(drafted: Tensor, parents: Sequence[int], logits: Tensor) -> tuple[list[int], int]:
        path, following = real(drafted, parents, logits)
        if not path:
            return path, following
        path[-1] = max(i for i, parent in enumerate(parents, 1) if parent == parents[path[-1] - 1])
        return path, following

    with patch.object(loop, "accept_tree_greedy", accept):
        yield


@caught_by(check_trees)
def padding_taken_for_a_token() -> Iterator[None]:
    """Paths of a tree are padded to one length by a token, and the padding stands where the full model chooses that very token, as in
    SWIFT's code."""
    padding = 34   # which the texts of the check have
    real = trees.accept_tree_greedy

    def accept(drafted: Tensor, parents: Sequence[int], logits: Tensor) -> tuple[list[int], int]:
        path, following = real(drafted, parents, logits)
        if following == padding:
            return [*path, len(parents)], int(logits[-1].argmax())
        return path, following

    with patch.object(loop, "accept_tree_greedy", accept):
        yield


@caught_by(check_tree_acceptance)
def residual_over_a_little_more_than_its_sum() -> Iterator[None]:
    """What is left of p is divided by its sum and a little, so that it is no distribution, as in SWIFT's code."""
    def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
        left = acceptance.residual(p, q, token)
        total = (p - q).clamp(min=0).sum() if q is not None else 1 - p[token]
        return left * total / (total + 1e-6)

    with patch.object(trees, "residual", residual):
        yield


@caught_by(check_tree_acceptance)
def residual_against_the_first_q_again() -> Iterator[None]:
    """A second sibling is weighed as if the first one could have been drawn once more."""
    def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
        return p if q is None else acceptance.residual(p, q, token)

    with patch.object(trees, "residual", residual):
        yield


@caught_by(check_tree_acceptance)
def residual_against_another_branch() -> Iterator[None]:
    """A rejected token is weighed by the distribution that the tokens of another branch were drawn from."""
    real = trees.accept_tree_sampled

    def accept(drafted: Tensor, parents: Sequence[int], q: Tensor | None, p: Tensor, generator: torch.Generator) -> tuple[list[int], int]:
        return real(drafted, parents, None if q is None else q.flip(0), p, generator)

    with patch.object(tree_checks, "accept_tree_sampled", accept):
        yield


@caught_by(check_tree_sampling)
def siblings_drawn_with_replacement() -> Iterator[None]:
    """A sibling may be the token beside which it stands."""
    def draw(self: SamplingPicker, scored: Scored) -> tuple[Tensor, Tensor | None]:
        return torch.multinomial(scored.weights, self.choices, replacement=True, generator=self.generator), scored.weights

    with patch.object(SamplingPicker, "draw", draw):
        yield


@caught_by(check_tree_sampling)
def token_behind_a_path_drawn_unwarped() -> Iterator[None]:
    real = SamplingPicker.probs

    def probs(self: SamplingPicker, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if len(logits) > 1 else real(self, logits)

    with patch.object(SamplingPicker, "probs", probs):
        yield


# --- drafts with weights of their own ----------------------------------------------------------------------------------------


@caught_by(check_adapted)
def trained_weights_verify() -> Iterator[None]:
    """The trained sub-layers are put into the model itself, so that verification runs them too."""
    real = AdaptedDrafter.begin

    def begin(self: AdaptedDrafter, ctx: DecodeContext) -> Any:
        ctx.model = self.model
        return real(self, ctx)

    real_full = loop.DecodeLoop._round

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        with patch.object(self, "model", request.ctx.model):
            return real_full(self, request, room)

    with patch.object(AdaptedDrafter, "begin", begin), patch.object(loop.DecodeLoop, "_round", rounds):
        yield


@caught_by(check_adapted_drafts)
def trained_weights_are_never_used() -> Iterator[None]:
    """Lossless, and for nothing: the draft runs the model's own weights."""
    with patch.object(AdaptedSession, "draft", lambda self, ctx, most: self.skip.draft(ctx, most)):
        yield


# --- masks chosen while decoding ---------------------------------------------------------------------------------------------


@caught_by(check_clasp)
def token_that_is_planned_for_sees_itself_twice() -> Iterator[None]:
    """The committed slot of the token is visible beside the row that stands in its place."""
    real = Planner.anchored
    with patch.object(Planner, "anchored", lambda self, start, positions, anchors, groups:
                      real(self, start, positions, anchors + 1, groups)):
        yield


@caught_by(check_clasp)
def states_of_a_plan_see_each_other() -> Iterator[None]:
    real = Planner.anchored
    with patch.object(Planner, "anchored", lambda self, start, positions, anchors, groups:
                      real(self, start, positions, anchors, torch.zeros_like(groups))):
        yield


@caught_by(check_clasp)
def plan_from_a_rejected_row() -> Iterator[None]:
    """The states are those of the last row of the verify pass, whether it stood or not."""
    real = LastToken._planned

    def planned(self: LastToken, ctx: DecodeContext, row: int) -> Any:
        return real(self, ctx, self.states[0].shape[1] - 1)

    with patch.object(LastToken, "_planned", planned):
        yield


@caught_by(check_clasp)
def plan_that_is_late() -> Iterator[None]:
    """A plan is made one round after it is due."""
    real = LastToken.next

    def following(self: LastToken, ctx: DecodeContext, path: Sequence[int]) -> Any:
        before = self.since
        found = real(self, ctx, path)
        if found is not None:
            self.since = before - self.spec.interval
        return found

    with patch.object(LastToken, "next", following):
        yield


@caught_by(check_asd)
def branch_compared_without_its_residual() -> Iterator[None]:
    real = PromptCosines.tap

    def tap(self: PromptCosines, model: Any, cache: KVCache, plan: PassPlan, rows: int) -> Any:
        look = real(self, model, cache, plan, rows)

        def of_branches(i: int, h: Tensor) -> Any:
            between = look(i, h) if look else None
            return between and (lambda behind: between(behind - h))

        return of_branches

    with patch.object(PromptCosines, "tap", tap):
        yield


@caught_by(check_asd)
def layers_counted_from_0() -> Iterator[None]:
    real = PromptCosines.first

    def first(self: PromptCosines, ctx: DecodeContext) -> Any:
        mask = real(self, ctx)
        every = {i for i in range(mask.n_layers - self.spec.keep_last) if self.spec.every and i % self.spec.every == 0}
        return replace(mask, attn=tuple(sorted({*mask.attn, *every})), mlp=tuple(sorted(every)))

    with patch.object(PromptCosines, "first", first):
        yield


@caught_by(check_asd)
def mask_of_the_request_before() -> Iterator[None]:
    kept: dict[ASD, Any] = {}
    real = PromptCosines.first

    def first(self: PromptCosines, ctx: DecodeContext) -> Any:
        return kept.setdefault(self.spec, real(self, ctx))

    with patch.object(PromptCosines, "first", first):
        yield


@caught_by(check_asd)
def generated_tokens_in_the_mean() -> Iterator[None]:
    """The cosines of the text written so far move the mask, which is to be the prompt's alone."""
    real = PromptCosines.tap

    def tap(self: PromptCosines, *of_the_pass: Any) -> Any:
        self.decided = False
        return real(self, *of_the_pass)

    with patch.object(PromptCosines, "tap", tap), patch.object(PromptCosines, "next", lambda self, ctx, path: self.mask(self.spec)):
        yield


@caught_by(check_clasp)
def states_of_the_thinned_model() -> Iterator[None]:
    """The plan aims at what the model makes under the mask of the plan before, and not at what the full model makes."""
    real, skipped = programme.solve_token, list[Any]()

    def solve(states: Tensor, steps: Any, run: Any, count: int) -> Any:
        rows = states.clone()
        for step in steps:
            before = rows[step.layer]
            rows[step.layer + 1] = before if step in skipped else run(step.layer, before.expand(count + 1, -1), step.attn, step.mlp)[0]
        skipped[:] = real(rows, steps, run, count)
        return list(skipped)

    with patch.object(programme, "solve_token", solve):
        yield


@caught_by(check_swift_as_published)
def latest_tokens_judged_as_published() -> Iterator[None]:
    """The published rule reads the first tokens behind the prompt."""
    with patch.object(OnTheFly, "_named_at_the_start", OnTheFly._named):
        yield


@caught_by(check_swift_as_published)
def mask_at_the_start_judged_as_published() -> Iterator[None]:
    """The published search has no score of the mask that it starts with."""
    real = OnTheFly._try

    def tried(self: OnTheFly, ctx: DecodeContext) -> None:
        stream = self.drafter.stream
        if not stream.tried:
            stream.named, stream.tried = self._named_at_the_start(ctx, stream.mask), self.drafter.spec.window
        real(self, ctx)

    with patch.object(OnTheFly, "_try", tried):
        yield


@caught_by(check_asd)
def padding_in_the_mean() -> Iterator[None]:
    """Rows that only fill a pass up count as prompt."""
    real = PromptCosines.tap

    def tap(self: PromptCosines, model: Any, cache: KVCache, plan: PassPlan, rows: int) -> Any:
        return real(self, model, cache, plan, plan.positions.shape[1])

    with patch.object(PromptCosines, "tap", tap):
        yield


@caught_by(check_swift)
def tried_tokens_see_each_other() -> Iterator[None]:
    """Masks are judged with the draft's own K/V in the place of the full model's."""
    real = Planner.anchored
    with patch.object(Planner, "anchored", lambda self, start, positions, anchors, groups:
                      real(self, start, positions, anchors * 0 + anchors.min(), torch.zeros_like(groups))):
        yield


@caught_by(check_choosing)
def trial_written_over_the_text() -> Iterator[None]:
    """The rows of a trial are written to the slots that they stand for."""
    real = Planner.anchored

    def anchored(self: Planner, start: int, positions: Tensor, anchors: Tensor, groups: Tensor) -> PassPlan:
        plan = real(self, start, positions, anchors, groups)
        return replace(plan, slots=positions, start=None)

    with patch.object(Planner, "anchored", anchored):
        yield


@caught_by(check_choosing)
def mask_changed_within_a_round() -> Iterator[None]:
    """A mask is chosen while a draft is under way, and its K/V are taken for the full model's."""
    real = ChoosingSession.committed

    def committed(self: ChoosingSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        real(self, ctx, path)
        ctx.cache.length += self.masks[-1][0] == self.round

    with patch.object(ChoosingSession, "committed", committed):
        yield


# --- recurrent layers ----------------------------------------------------------------------------------------------------------


@caught_by(check_recurrent)
def recurrent_state_not_restored() -> Iterator[None]:
    """What a rejected draft changed in a state stays changed."""
    real = RecurrentCache.begin

    def begin(self: RecurrentCache, start: int, mask: Any) -> Standing | None:
        if self.latest is not None and self.latest.at > start:
            self.latest = Standing(start, self.latest.states)
        return real(self, start, mask)

    with patch.object(RecurrentCache, "begin", begin):
        yield


@caught_by(check_recurrent)
def riding_rows_counted_twice() -> Iterator[None]:
    """Tokens that rode along with a pass, and are in the states that it kept, ride along with the next one too."""
    real = RecurrentCache.passed

    def passed(self: RecurrentCache, start: int, kept: Any, latest: Standing) -> None:
        began = self.kept.at if self.kept is not None else 0
        real(self, start, kept, latest)
        if kept is not None:
            self.kept = Standing(began, kept)

    with patch.object(RecurrentCache, "passed", passed):
        yield


@caught_by(check_recurrent)
def states_of_a_draft_verify() -> Iterator[None]:
    """A verify pass goes on from where a draft's states happen to stand."""
    real = RecurrentCache.begin

    def begin(self: RecurrentCache, start: int, mask: Any) -> Standing | None:
        if mask is None and self.draft is not None:
            return Standing(start, self.draft[1].states)
        return real(self, start, mask)

    with patch.object(RecurrentCache, "begin", begin):
        yield


@caught_by(check_recurrent)
def states_shared_and_not_copied() -> Iterator[None]:
    """A draft changes the very states that verification goes on from."""
    with patch("skipsearch.models.recurrent.cloned", lambda state: state):
        yield


@caught_by(check_growing_recurrent)
def tokens_left_behind_in_a_small_cache() -> Iterator[None]:
    """A session's larger cache takes K/V and states over, and not the tokens that are to ride along."""
    real = RecurrentCache.take_over

    def take_over(self: RecurrentCache, other: KVCache, count: int) -> None:
        real(self, other, count)
        self.tokens.zero_()

    with patch.object(RecurrentCache, "take_over", take_over):
        yield


# --- kangaroo ------------------------------------------------------------------------------------------------------------------


@caught_by(check_kangaroo_drafts)
def adapter_does_not_catch_up() -> Iterator[None]:
    """The last token of a round that was accepted whole, and what other drafters brought, never reach the adapter's cache."""
    real = ResumingSession._behind

    def behind(self: ResumingSession, ctx: DecodeContext) -> Tensor:
        return real(self, ctx)[:, -1:]

    with patch.object(ResumingSession, "_behind", behind):
        yield


@caught_by(check_kangaroo_drafts)
def adapter_is_not_rolled_back() -> Iterator[None]:
    """What the adapter wrote for rejected tokens is taken for that of the tokens in their places."""
    real = ResumingSession.verified

    def verified(self: ResumingSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        real(self, ctx, path)
        self.known = self._begun + self._drafted

    with patch.object(ResumingSession, "verified", verified):
        yield


@caught_by(check_kangaroo_drafts)
def rows_of_rejected_tokens_are_kept() -> Iterator[None]:
    """The adapter reads the states of all rows of a verify pass, those of tokens that fell included."""
    def committed(self: ResumingSession, ctx: DecodeContext, path: Sequence[int]) -> None:
        states = torch.cat(self._seen, dim=1)
        start = ctx.cache.length - 1 - len(path)
        self._owed.append(states[:, max(0, self.known - start):])
        self._seen = []

    with patch.object(ResumingSession, "committed", committed):
        yield


@caught_by(check_kangaroo_drafts)
def verification_resumes_from_stale_rows() -> Iterator[None]:
    """The rows that a draft hands over are those of the round before."""
    real, kept = ResumingSession._resuming, dict[tuple[int, ...], Tensor]()

    def resuming(self: ResumingSession, draft: Draft, reached: Tensor) -> Draft:
        stale = kept.get(reached.shape, reached)
        kept[reached.shape] = reached
        return real(self, draft, stale)

    with patch.object(ResumingSession, "_resuming", resuming):
        yield


@caught_by(check_kangaroo_drafts)
def verification_resumes_a_layer_too_late() -> Iterator[None]:
    real = loop.resumed

    def resumed(model: Any, hidden: Tensor, first: int, rest: Tensor, cache: KVCache, plan: PassPlan, tap: Any) -> Tensor:
        return real(model, hidden, first + 1, rest, cache, plan, lambda i, h: tap(i - 1, h))

    with patch.object(loop, "resumed", resumed):
        yield


@caught_by(check_kangaroo_siblings)
def siblings_skip_the_layers_below_the_exit() -> Iterator[None]:
    """Rows that no draft pass went through take a row in their place that one did."""
    real = loop.resumed

    def resumed(model: Any, hidden: Tensor, first: int, rest: Tensor, *arguments: Any) -> Tensor:
        return real(model, hidden, first, rest[:, :1].expand_as(rest), *arguments)

    with patch.object(loop, "resumed", resumed):
        yield


@caught_by(check_kangaroo_passes)
def verification_begins_at_layer_0() -> Iterator[None]:
    """Right tokens, and the work below the exit done twice."""
    with patch.object(ResumingSession, "_resuming", lambda self, draft, reached: draft):
        yield


@caught_by(check_kangaroo_drafts)
def unsure_token_is_dropped() -> Iterator[None]:
    """The token at which a round stops is not verified, although its feature is computed."""
    real = KangarooSession.draft

    def draft(self: KangarooSession, ctx: DecodeContext, most: int) -> Draft | None:
        found = real(self, ctx, most)
        if found is None or len(found.tokens) in (1, most):
            return found
        self._drafted -= 1
        return Draft(found.tokens[:-1], None if found.probs is None else found.probs[:-1])

    with patch.object(KangarooSession, "draft", draft):
        yield


@caught_by(check_kangaroo_drafts)
def final_norm_in_the_place_of_the_adapters() -> Iterator[None]:
    with patch.object(Shallow, "head", lambda self, h: self.model.head(h)):
        yield


# --- s3d -----------------------------------------------------------------------------------------------------------------------


@caught_by(check_s3d_drafts)
def changes_for_drafting_verify() -> Iterator[None]:
    """The low-rank changes are put into the model itself, so that verification runs them too."""
    real = loop.DecodeLoop._full

    def full(self: loop.DecodeLoop, *arguments: Any, **options: Any) -> Any:
        inner = [getattr(drafter, "inner", None) for _, drafter in self.drafters]
        changed = next((drafter.simultaneous.model for drafter in inner if hasattr(drafter, "simultaneous")), self.model)
        with patch.object(self, "model", changed):
            return real(self, *arguments, **options)

    with patch.object(loop.DecodeLoop, "_full", full):
        yield


@caught_by(check_s3d_drafts)
def embeddings_of_the_wrong_depth() -> Iterator[None]:
    real = Simultaneous.states

    def states(self: Simultaneous, *arguments: Any) -> Tensor:
        with patch.object(self, "unknown", self.unknown.roll(1, 0)):
            return real(self, *arguments)

    with patch.object(Simultaneous, "states", states):
        yield


@caught_by(check_s3d_trees)
def nodes_of_a_tree_take_the_row_of_their_parent() -> Iterator[None]:
    real = s3d.as_tree
    with patch.object(s3d, "as_tree", lambda tree, ranked, probs: real(tree, torch.cat([ranked[:1], ranked[:-1]]), probs)):
        yield


@caught_by(check_s3d_tree_sampling)
def nodes_of_a_tree_carry_the_distribution_of_another_depth() -> Iterator[None]:
    real = s3d.as_tree

    def as_tree(tree: Any, ranked: Tensor, probs: Tensor) -> Draft:
        found = real(tree, ranked, probs)
        return replace(found, probs=found.probs.flip(0))

    with patch.object(s3d, "as_tree", as_tree):
        yield
