"""A constraint of a few tokens, by a rule on token ids, without a library."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import numpy as np

from skipsearch.decoding import Request
from skipsearch.errors import DecodeError
from skipsearch.models.adapter import ModelAdapter

# tokens of the answer so far -> (legal tokens, the tokens that are said to be forced)
Rule = Callable[[tuple[int, ...]], tuple[frozenset[int], tuple[int, ...]]]


def make_rule(seed: int, vocab: int, eos: int) -> Rule:
    """Return a rule that depends on the last two tokens and on the position.

    In some states one token is legal, in some two of which one is said to be forced, and in the
    others about half of all.
    """

    @cache
    def rule(tokens: tuple[int, ...]) -> tuple[frozenset[int], tuple[int, ...]]:
        chance = random.Random(f"{seed} {tokens[-2:]} {len(tokens) % 3}")
        kind, others = chance.random(), [t for t in range(vocab) if t != eos]
        few = chance.sample(others, 2)
        if kind < 0.25:
            return frozenset(few[:1]), tuple(few[:1])
        if kind < 0.5:
            return frozenset(few), tuple(few[:1])
        legal = frozenset(chance.sample(others, max(2, vocab // 2)))
        return (legal | {eos} if chance.random() < 0.2 else legal), ()

    return rule


class ToyMatcher:
    """The state of a rule after some tokens. It implements the port `Matcher`."""

    def __init__(self, rule: Rule, eos: int):
        self.rule, self.eos = rule, eos
        self.tokens: list[int] = []

    def legal(self, tokens: Sequence[int]) -> frozenset[int]:
        return frozenset() if self.eos in tokens else self.rule(tuple(tokens))[0]

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = False
        mask[list(self.legal(self.tokens))] = True

    def count_legal(self, tokens: Sequence[int]) -> int:
        text = list(self.tokens)
        for n, token in enumerate(tokens):
            if token not in self.legal(text):
                return n
            text.append(token)
        return len(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self.legal(self.tokens):
                raise DecodeError(f"token {token} is not legal")
            self.tokens.append(token)

    def roll_back(self, n_tokens: int) -> None:
        del self.tokens[len(self.tokens) - n_tokens :]

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while len(forced) < 4 and self.eos not in (*self.tokens, *forced):
            more = self.rule((*self.tokens, *forced))[1]
            if not more:
                break
            forced += more
        return forced

    @property
    def is_complete(self) -> bool:
        return self.legal(self.tokens) == {self.eos}

    @property
    def has_ended(self) -> bool:
        return self.eos in self.tokens


@contextmanager
def constrained_by(rule: Rule, eos: int) -> Iterator[None]:
    """Give every request this constraint within the context."""

    def new_matcher(self: Request, model: ModelAdapter) -> ToyMatcher:
        return ToyMatcher(rule, eos)

    with patch.object(Request, "new_matcher", new_matcher):
        yield
