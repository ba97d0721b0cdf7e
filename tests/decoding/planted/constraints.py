"""Bugs of decoding under a constraint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from helpers.toy_constraint import ToyMatcher

from skipsearch.decoding import acceptor
from skipsearch.decoding.acceptor import Acceptor, make_masks
from skipsearch.drafters import Draft

from ..constraint_checks import (
    check_constrained_counts,
    check_constrained_greedy,
    check_constrained_law,
)
from .register import caught_by, planted


@caught_by(check_constrained_greedy)
def the_state_of_a_rejected_token_stays() -> Iterator[None]:
    with patch.object(ToyMatcher, "roll_back", lambda self, n_tokens: None):
        yield


@planted(check_constrained_greedy, acceptor, "make_masks")
def a_row_has_the_mask_of_the_row_before(real, matcher, tokens, parents, vocab_size):
    masks = make_masks(matcher, tokens, parents, vocab_size)
    masks[1:] = masks[:-1].copy()
    return masks


@planted(check_constrained_greedy, acceptor, "accept_greedy")
def forced_tokens_are_not_verified(real, draft_tokens, logits):
    """The last row chooses the token after them, as if all were accepted."""
    return len(draft_tokens), int(logits[-1].argmax())


@planted(check_constrained_law, Acceptor, "cut")
def q_counts_illegal_tokens(real, self, draft):
    """A draft is cut, and its distribution is still that of all tokens."""
    result = real(self, draft)
    if result is None or draft.probs is None or result.probs is None:
        return result
    return replace(result, probs=draft.probs[: len(result.tokens)])


@planted(check_constrained_counts, Acceptor, "cut")
def a_drafter_learns_nodes_of_the_tree_that_the_constraint_left(real, self, draft):
    result = real(self, draft)
    return None if result is None else replace(result, own_nodes=None)


@caught_by(check_constrained_counts)
def siblings_of_a_removed_token_do_not_count_as_drafted() -> Iterator[None]:
    def n_main(self: Draft) -> int:
        return len(self.tokens) if self.n_main is None else self.n_main

    with patch.object(Draft, "depth", property(n_main)):
        yield
