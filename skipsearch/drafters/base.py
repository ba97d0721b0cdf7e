"""The drafter port: where draft tokens come from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from skipsearch.cache import KVCache, Planner
from skipsearch.engine import Scored
from skipsearch.models.spec import ModelAdapter


class TokenPicker(Protocol):
    """Chooses a token from logits the way the request asks for: greedily, or by sampling from a warped distribution."""

    @property
    def key(self) -> Hashable:
        """Equal for pickers that score alike."""

    def score(self, logits: Tensor, sure: bool) -> Scored:
        """logits: [B, V] -> what a token is chosen by and, with `sure`, the top probability of the distribution that it is drawn from (of
        the plain softmax where the choice is greedy)."""

    def draw(self, scored: Scored) -> tuple[Tensor, Tensor | None]:
        """(tokens [B, 1], the distribution they were drawn from [B, V], or None for a greedy choice)."""


@dataclass
class DecodeContext:
    """What a drafter works with in one round.

    pending: [B, 1], the last emitted token, whose K/V no pass has written yet. history: all tokens of each row, prompt included.
    A drafter may write K/V behind `cache.length`, never before it: verification writes over what it leaves there.
    """

    model: ModelAdapter
    cache: KVCache
    planner: Planner
    pending: Tensor
    history: list[list[int]]
    picker: TokenPicker


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of one round.

    tokens: [B, N]; lengths: tokens of each row that count. parents: [N], the node before each of a tree; None is a chain.
    probs: [B, N, V], what each token was drawn from; None where every choice was certain (a one-hot q).
    resume: (hidden [B, N, H], layer), set when everything before `layer` was computed exactly as the full model would, for the rows that
    were fed; the last drafted token was not fed and pays its own way.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    parents: Tensor | None = None
    probs: Tensor | None = None
    resume: tuple[Tensor, int] | None = None


class Drafter(Protocol):
    kind: ClassVar[str]

    def draft(self, ctx: DecodeContext, max_tokens: int) -> Draft:
        """At least one and at most max_tokens tokens for every row; max_tokens >= 1."""

    def commit(self, accepted: list[list[int]]) -> None:
        """Indices of accepted draft tokens, a list for each row; called after every verify pass."""
