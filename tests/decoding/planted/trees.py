"""Bugs of trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import acceptance, acceptor, loop, trees
from skipsearch.engine import DraftScores
from skipsearch.engine.sampler import TemperatureSampler
from skipsearch.models.kv_cache import KVCache, PassPlan, Planner

from .. import tree_checks
from ..tree_checks import check_tree_acceptance, check_tree_sampling, check_trees
from .register import caught_by


@caught_by(check_trees)
def sibling_sees_its_sibling() -> Iterator[None]:
    """In a verify pass over a tree, every row sees all rows before it, as in a chain."""
    real = Planner.plan_tree

    def tree(self: Planner, start: int, parents: Sequence[int]) -> PassPlan:
        plan = real(self, start, parents)
        return replace(
            plan, mask=(self.list_slots(plan.n_keys) <= plan.slots[0, :, None])[None, None]
        )

    with patch.object(Planner, "plan_tree", tree):
        yield


@caught_by(check_trees)
def sibling_stands_where_its_slot_is() -> Iterator[None]:
    """Positions count rows, so the rotary position of a sibling is wrong."""
    real = Planner.plan_tree

    def tree(self: Planner, start: int, parents: Sequence[int]) -> PassPlan:
        plan = real(self, start, parents)
        return replace(plan, positions=plan.slots)

    with patch.object(Planner, "plan_tree", tree):
        yield


@caught_by(check_trees)
def path_not_moved() -> Iterator[None]:
    """The K/V of an accepted sibling stay in the slot that the tree used."""
    with patch.object(KVCache, "compact", lambda self, slots, start: None):
        yield


@caught_by(check_trees)
def length_advanced_by_rows() -> Iterator[None]:
    """Rejected siblings count as committed."""
    real = loop.DecodeLoop._run_round

    def rounds(self: loop.DecodeLoop, request: Any, room: int) -> list[int]:
        before = sum(d.siblings for d in request.stats.by_drafter)
        tokens = real(self, request, room)
        request.ctx.cache.length += sum(d.siblings for d in request.stats.by_drafter) - before
        return tokens

    with patch.object(loop.DecodeLoop, "_run_round", rounds):
        yield


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


@caught_by(check_tree_acceptance)
def residual_over_a_little_more_than_its_sum() -> Iterator[None]:
    """The rest of p is divided by slightly more than its sum, as in SWIFT's code.

    So it is not a distribution.
    """

    def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
        left = acceptance.residual(p, q, token)
        total = (p - q).clamp(min=0).sum() if q is not None else 1 - p[token]
        return left * total / (total + 1e-6)

    with patch.object(trees, "residual", residual):
        yield


@caught_by(check_tree_acceptance)
def residual_against_the_first_q_again() -> Iterator[None]:
    """A second sibling is judged as if the first one could have been drawn again."""

    def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
        return p if q is None else acceptance.residual(p, q, token)

    with patch.object(trees, "residual", residual):
        yield


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


@caught_by(check_tree_sampling)
def siblings_drawn_with_replacement() -> Iterator[None]:
    """A sibling may be equal to the token that it is an alternative to."""

    def draw(self: TemperatureSampler, scored: DraftScores) -> tuple[Tensor, Tensor | None]:
        assert scored.probs is not None
        return torch.multinomial(
            scored.probs, self.n_choices, replacement=True, generator=self.generator
        ), scored.probs

    with patch.object(TemperatureSampler, "draw", draw):
        yield


@caught_by(check_tree_sampling)
def token_behind_a_path_drawn_unwarped() -> Iterator[None]:
    real = TemperatureSampler.warp_to_probs

    def probs(self: TemperatureSampler, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if len(logits) > 1 else real(self, logits)

    with patch.object(TemperatureSampler, "warp_to_probs", probs):
        yield
