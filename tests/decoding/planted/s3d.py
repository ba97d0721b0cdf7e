"""Mistakes: s3d."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from skipsearch.decoding import loop
from skipsearch.drafters import Draft, s3d
from skipsearch.modules.s3d import Simultaneous

from ..s3d_checks import check_s3d_drafts, check_s3d_tree_sampling, check_s3d_trees
from .register import caught_by


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
