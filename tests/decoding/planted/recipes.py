"""Bugs of recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import acceptance, acceptor, loop
from skipsearch.decoding.guard import Guard
from skipsearch.decoding.loop import DecodeLoop
from skipsearch.drafters import DecodeContext, Draft
from skipsearch.drafters.lookup.answer_memory import AnswerMemory
from skipsearch.drafters.lookup.session import LookupDrafter, LookupSession
from skipsearch.drafters.lookup.suffix_index import Match, SuffixIndex
from skipsearch.engine import draws

from ..checks import check_greedy
from ..recipe_checks import check_certain_sampling, check_guard, check_lookup, check_memory
from .register import caught_by


@caught_by(check_lookup)
def lookup_one_place_off() -> Iterator[None]:
    """The proposal starts one token after the one that followed the match."""
    real = SuffixIndex.longest_match

    def match(self: SuffixIndex) -> Match | None:
        found = real(self)
        return (
            None if found is None else Match(found.length, min(found.position + 1, len(self) - 1))
        )

    with patch.object(SuffixIndex, "longest_match", match):
        yield


@caught_by(check_lookup)
def lookup_across_requests() -> Iterator[None]:
    """One index serves all requests of a drafter.

    A user's text speeds up the requests of another user, who can notice it.
    """
    real = LookupDrafter.new_session

    def new_session(self: LookupDrafter) -> LookupSession:
        session = real(self)
        session.index = self.__dict__.setdefault("index", session.index)
        return session

    with patch.object(LookupDrafter, "new_session", new_session):
        yield


@caught_by(check_lookup)
def answers_remembered_unasked() -> Iterator[None]:
    """Every decoder has a memory: the answers of one user speed up the requests of another."""
    real = DecodeLoop.__init__

    def init(self: DecodeLoop, *args: Any) -> None:
        real(self, *args)
        self.answer_memory = AnswerMemory(1000)

    with patch.object(DecodeLoop, "__init__", init):
        yield


@caught_by(check_memory)
def memory_reaches_into_the_next_answer() -> Iterator[None]:
    """Nothing separates two answers in the memory."""

    def add(self: AnswerMemory, answer: Sequence[int]) -> None:
        self._index.extend(answer)

    with patch.object(AnswerMemory, "add", add):
        yield


@caught_by(check_lookup)
def pending_token_not_looked_up() -> Iterator[None]:
    """The index is one token late, so its proposal belongs one position earlier."""
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
    """While a drafter rests, its round is left out and not replaced by a plain one."""
    real = loop.DecodeLoop._run_round

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        tokens = real(self, request, room)
        resting = request.guard is not None and request.guard.is_paused(0)
        return tokens if not resting else tokens[1:] or tokens + tokens

    with patch.object(loop.DecodeLoop, "_run_round", rounds):
        yield


@caught_by(check_guard)
def guard_shared_by_requests() -> Iterator[None]:
    """The guard's counts of one request affect the next one."""
    kept: list[Guard] = []

    def guard(prices: Any) -> Guard:
        kept.append(kept[0] if kept else Guard(prices))
        return kept[-1]

    with patch.object(loop, "Guard", guard):
        yield


@caught_by(check_guard)
def guard_told_of_nobody() -> Iterator[None]:
    """Rounds count as if nothing was drafted, so no drafter ever rests."""
    real = Guard.record_round

    def passed(
        self: Guard, drafter: int | None, drafted: int = 0, accepted: int = 0, siblings: int = 0
    ) -> None:
        real(self, None)

    with patch.object(Guard, "record_round", passed):
        yield


@caught_by(check_certain_sampling)
def certain_token_kept_whatever_its_chance() -> Iterator[None]:
    """A looked-up token counts as drawn from p itself, so it is always accepted."""
    real = acceptance.accept_sampled

    def accept(
        drafted: Tensor, q: Tensor | None, p: Tensor, generator: torch.Generator
    ) -> tuple[int, int]:
        if q is not None or not len(drafted):
            return real(drafted, q, p, generator)
        return len(drafted), int(draws.draw_tokens(p[len(drafted)], generator))

    with patch.object(acceptor, "accept_sampled", accept):
        yield
