"""Bugs of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import acceptance, acceptor, loop
from skipsearch.decoding.guard import Guard
from skipsearch.decoding.loop import DecodeLoop
from skipsearch.drafters.lookup.answer_memory import AnswerMemory
from skipsearch.drafters.lookup.session import LookupDrafter, LookupSession
from skipsearch.drafters.lookup.suffix_index import Match, SuffixIndex
from skipsearch.engine import draws

from ..checks import check_greedy
from ..recipe_checks import check_certain_sampling, check_guard, check_lookup, check_memory
from .register import caught_by, planted


@planted(check_lookup, SuffixIndex, "longest_match")
def lookup_one_place_off(real, self):
    """The proposal starts one token after the one that followed the match."""
    found = real(self)
    return None if found is None else Match(found.length, min(found.position + 1, len(self) - 1))


@planted(check_lookup, LookupDrafter, "new_session")
def lookup_across_requests(real, self):
    """One index serves all requests of a drafter.

    A user's text speeds up the requests of another user, who can notice it.
    """
    session = real(self)
    session.index = self.__dict__.setdefault("index", session.index)
    return session


@planted(check_lookup, DecodeLoop, "__init__")
def answers_remembered_unasked(real, self, *args):
    """Every decoder has a memory: the answers of one user speed up the requests of another."""
    real(self, *args)
    self.answer_memory = AnswerMemory(1000)


@planted(check_memory, AnswerMemory, "add")
def memory_reaches_into_the_next_answer(real, self, answer):
    """Nothing separates two answers in the memory."""
    self._index.extend(answer)


@planted(check_lookup, LookupSession, "draft")
def pending_token_not_looked_up(real, self, ctx, most):
    """The index is one token late, so its proposal belongs one position earlier."""
    return real(self, replace(ctx, history=ctx.history[:-1]), most)


@planted(check_lookup, LookupSession, "draft")
def rejected_tokens_enter_the_index(real, self, ctx, most):
    found = real(self, ctx, most)
    if found is not None:
        self.index.extend(found.tokens.tolist())
    return found


@planted(check_greedy, loop.DecodeLoop, "_run_round")
def guard_that_loses_a_token(real, self, request, room):
    """While a drafter rests, its round is left out and not replaced by a plain one."""
    tokens = real(self, request, room)
    resting = request.guard is not None and request.guard.is_paused(0)
    return tokens if not resting else tokens[1:] or tokens + tokens


@caught_by(check_guard)
def guard_shared_by_requests() -> Iterator[None]:
    """The guard's counts of one request affect the next one."""
    kept: list[Guard] = []

    def guard(prices: Any) -> Guard:
        kept.append(kept[0] if kept else Guard(prices))
        return kept[-1]

    with patch.object(loop, "Guard", guard):
        yield


@planted(check_guard, Guard, "record_round")
def guard_told_of_nobody(real, self, drafter, drafted=0, accepted=0, siblings=0):
    """Rounds count as if nothing was drafted, so no drafter ever rests."""
    real(self, None)


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
