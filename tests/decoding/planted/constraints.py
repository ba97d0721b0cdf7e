"""Bugs of decoding under a constraint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from helpers.toy_constraint import ToyMatcher
from torch import Tensor

from skipsearch.constraints import Matcher
from skipsearch.decoding import acceptor
from skipsearch.decoding.acceptor import Acceptor, make_masks
from skipsearch.drafters import Draft

from ..constraint_checks import (
    check_constrained_counts,
    check_constrained_greedy,
    check_constrained_law,
)
from .register import caught_by


@caught_by(check_constrained_greedy)
def the_state_of_a_rejected_token_stays() -> Iterator[None]:
    with patch.object(ToyMatcher, "roll_back", lambda self, n_tokens: None):
        yield


@caught_by(check_constrained_greedy)
def a_row_has_the_mask_of_the_row_before() -> Iterator[None]:
    def late(
        matcher: Matcher, tokens: Sequence[int], parents: Sequence[int] | None, vocab_size: int
    ) -> np.ndarray:
        masks = make_masks(matcher, tokens, parents, vocab_size)
        masks[1:] = masks[:-1].copy()
        return masks

    with patch.object(acceptor, "make_masks", late):
        yield


@caught_by(check_constrained_greedy)
def forced_tokens_are_not_verified() -> Iterator[None]:
    """The last row chooses the token after them, as if all were accepted."""

    def accept(draft_tokens: Tensor, logits: Tensor) -> tuple[int, int]:
        return len(draft_tokens), int(logits[-1].argmax())

    with patch.object(acceptor, "accept_greedy", accept):
        yield


@caught_by(check_constrained_law)
def q_counts_illegal_tokens() -> Iterator[None]:
    """A draft is cut, and its distribution is still that of all tokens."""
    real = Acceptor.cut

    def cut(self: Acceptor, draft: Draft) -> Draft | None:
        result = real(self, draft)
        if result is None or draft.probs is None or result.probs is None:
            return result
        return replace(result, probs=draft.probs[: len(result.tokens)])

    with patch.object(Acceptor, "cut", cut):
        yield


@caught_by(check_constrained_counts)
def a_drafter_learns_nodes_of_the_tree_that_the_constraint_left() -> Iterator[None]:
    real = Acceptor.cut

    def cut(self: Acceptor, draft: Draft) -> Draft | None:
        result = real(self, draft)
        return None if result is None else replace(result, own_nodes=None)

    with patch.object(Acceptor, "cut", cut):
        yield


@caught_by(check_constrained_counts)
def siblings_of_a_removed_token_do_not_count_as_drafted() -> Iterator[None]:
    def n_main(self: Draft) -> int:
        return len(self.tokens) if self.n_main is None else self.n_main

    with patch.object(Draft, "depth", property(n_main)):
        yield
