"""Bugs of the end of a generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from skipsearch.decoding import loop
from skipsearch.decoding.stopping import Detokenizer, StopCondition

from ..checks import check_endings, check_greedy
from .register import caught_by, planted


@planted(check_greedy, StopCondition, "push_token")
def one_token_too_many(real, self, token):
    if real(self, token) == "length" and self.n_tokens == self.max_new_tokens:
        self.reason = None
    return self.reason


@caught_by(check_endings)
def eos_inside_a_round_does_not_cut_it() -> Iterator[None]:
    """The end is found only after a whole round has been emitted."""
    left = [
        1
    ]  # tokens of the round that are still to be pushed; the prefill's own is a round of one
    reasons: list[str] = []
    real_push, real_round, real_prefill = (
        StopCondition.push_token,
        loop.DecodeLoop._run_round,
        loop.DecodeLoop._prefill,
    )

    def prefill(self: loop.DecodeLoop, *args: Any) -> Any:
        left[0] = 1
        reasons.clear()
        return real_prefill(self, *args)

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        tokens = real_round(self, request, room)
        left[0] = len(tokens)
        return tokens

    def push(self: StopCondition, token: int) -> str | None:
        left[0] -= 1
        if reason := real_push(self, token):
            reasons.append(reason)
        return reasons[0] if reasons and not left[0] else None

    with (
        patch.object(StopCondition, "push_token", push),
        patch.object(loop.DecodeLoop, "_run_round", rounds),
        patch.object(loop.DecodeLoop, "_prefill", prefill),
    ):
        yield


@planted(check_endings, Detokenizer, "push_token")
def stop_string_sought_in_the_last_token_only(real, self, token):
    real(self, token)
    return any(s.text in self.tokenizer.decode([token]) for s in self.stop_strings)


@planted(check_endings, Detokenizer, "push_token")
def half_a_character_shown(real, self, token):
    self.tokens.append(token)
    self.ready += self.tokenizer.decode([token], skip_special_tokens=True)
    return any(s.text in self.ready for s in self.stop_strings)


@planted(check_endings, Detokenizer, "pop_text")
def start_of_a_stop_string_shown(real, self, last=False):
    if last:
        return real(self, last)
    text, self.ready = self.ready, ""
    return text
