"""Bugs of trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import acceptance, acceptor, loop, trees
from skipsearch.engine.sampler import TemperatureSampler
from skipsearch.models.kv_cache import KVCache, Planner

from .. import tree_checks
from ..tree_checks import check_tree_acceptance, check_tree_sampling, check_trees
from .register import caught_by, planted


@planted(check_trees, Planner, "plan_tree")
def sibling_sees_its_sibling(real, self, start, parents):
    """In a verify pass over a tree, every row sees all rows before it, as in a chain."""
    plan = real(self, start, parents)
    return replace(plan, mask=(self.list_slots(plan.n_keys) <= plan.slots[0, :, None])[None, None])


@planted(check_trees, Planner, "plan_tree")
def sibling_stands_where_its_slot_is(real, self, start, parents):
    """Positions count rows, so the rotary position of a sibling is wrong."""
    plan = real(self, start, parents)
    return replace(plan, positions=plan.slots)


@caught_by(check_trees)
def path_not_moved() -> Iterator[None]:
    """The K/V of an accepted sibling stay in the slot that the tree used."""
    with patch.object(KVCache, "compact", lambda self, slots, start: None):
        yield


@planted(check_trees, loop.DecodeLoop, "_run_round")
def length_advanced_by_rows(real, self, request, room):
    """Rejected siblings count as committed."""
    before = sum(d.siblings for d in request.stats.by_drafter)
    tokens = real(self, request, room)
    request.ctx.cache.length += sum(d.siblings for d in request.stats.by_drafter) - before
    return tokens


@caught_by(check_trees)
def any_sibling_of_a_right_token_stands() -> Iterator[None]:
    """Acceptance takes the last child if any of the children is right."""
    real = trees.accept_tree_greedy

    def accept(drafted: Tensor, parents: Sequence[int], logits: Tensor) -> tuple[list[int], int]:
        path, following = real(drafted, parents, logits)
        if not path:
            return path, following
        path[-1] = max(i for i, parent in enumerate(parents, 1) if parent == parents[path[-1] - 1])
        return path, following

    with patch.object(acceptor, "accept_tree_greedy", accept):
        yield


@caught_by(check_trees)
def padding_taken_for_a_token() -> Iterator[None]:
    """Paths of a tree are padded to one length by a token, as in SWIFT's code.

    The padding is accepted where the full model chooses that token.
    """
    padding = 34  # which the texts of the check have
    real = trees.accept_tree_greedy

    def accept(drafted: Tensor, parents: Sequence[int], logits: Tensor) -> tuple[list[int], int]:
        path, following = real(drafted, parents, logits)
        if following == padding:
            return [*path, len(parents)], int(logits[-1].argmax())
        return path, following

    with patch.object(acceptor, "accept_tree_greedy", accept):
        yield


@planted(check_tree_acceptance, trees, "residual")
def residual_over_a_little_more_than_its_sum(real, p, q, token):
    """The rest of p is divided by slightly more than its sum, as in SWIFT's code.

    So it is not a distribution.
    """
    left = acceptance.residual(p, q, token)
    total = (p - q).clamp(min=0).sum() if q is not None else 1 - p[token]
    return left * total / (total + 1e-6)


@planted(check_tree_acceptance, trees, "residual")
def residual_against_the_first_q_again(real, p, q, token):
    """A second sibling is judged as if the first one could have been drawn again."""
    return p if q is None else acceptance.residual(p, q, token)


@caught_by(check_tree_acceptance)
def residual_against_another_branch() -> Iterator[None]:
    """A rejected token is judged by the distribution of the tokens of another branch."""
    real = trees.accept_tree_sampled

    def accept(
        drafted: Tensor,
        parents: Sequence[int],
        q: Tensor | None,
        p: Tensor,
        generator: torch.Generator,
    ) -> tuple[list[int], int]:
        return real(drafted, parents, None if q is None else q.flip(0), p, generator)

    with patch.object(tree_checks, "accept_tree_sampled", accept):
        yield


@planted(check_tree_sampling, TemperatureSampler, "draw")
def siblings_drawn_with_replacement(real, self, scored):
    """A sibling may be equal to the token that it is an alternative to."""
    assert scored.probs is not None
    return torch.multinomial(
        scored.probs, self.n_choices, replacement=True, generator=self.generator
    ), scored.probs


@planted(check_tree_sampling, TemperatureSampler, "warp_to_probs")
def token_behind_a_path_drawn_unwarped(real, self, logits):
    return logits.softmax(dim=-1) if len(logits) > 1 else real(self, logits)
