"""Bugs of what drafts are trained on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from skipsearch.models.kv_cache import PassPlan, Planner
from skipsearch.training.distill_batch import TeacherTargets
from skipsearch.training.students import KangarooStudent

from ..training_checks import (
    check_adapted_rows,
    check_kangaroo_rows,
    check_only_the_drafts_own_learns,
    check_s3d_rows,
)
from .register import caught_by, planted


def _anchored(later: int = 0, together: bool = False) -> Iterator[None]:
    """Build a bug.

    later: how many later slots of the text a row sees. together: rows see those of all groups
    before them.
    """
    real = Planner.plan_replay

    def anchored(
        self: Planner, start: int, positions: Tensor, anchors: Tensor, groups: Tensor
    ) -> PassPlan:
        return real(
            self,
            start,
            positions,
            anchors + later,
            torch.zeros_like(groups) if together else groups,
        )

    with patch.object(Planner, "plan_replay", anchored):
        yield


@caught_by(check_s3d_rows)
def anchors_of_s3d_see_later_text() -> Iterator[None]:
    """A draft learns from the K/V of the tokens that it must predict."""
    yield from _anchored(later=1)


@caught_by(check_adapted_rows)
def anchors_of_adapted_drafts_see_later_text() -> Iterator[None]:
    yield from _anchored(later=1)


@caught_by(check_s3d_rows)
def drafts_of_s3d_see_each_other() -> Iterator[None]:
    """Later tokens attend to what earlier drafts wrote for unknown tokens."""
    yield from _anchored(together=True)


@caught_by(check_adapted_rows)
def adapted_drafts_see_each_other() -> Iterator[None]:
    yield from _anchored(together=True)


@planted(check_adapted_rows, Planner, "plan_replay")
def drafts_stand_where_their_rows_are(real, self, start, *arguments):
    """Positions continue after the text, as slots do."""
    plan = real(self, start, *arguments)
    return replace(plan, positions=plan.slots % self.capacity)


@planted(check_kangaroo_rows, KangarooStudent, "run_teacher")
def targets_are_those_of_the_token_before(real, self, texts, likeliest):
    """Inputs and targets are shifted against each other."""
    features, taught = real(self, texts, likeliest)
    return features, TeacherTargets(taught.tokens.roll(1, 1), taught.probs.roll(1, 1))


@caught_by(check_only_the_drafts_own_learns)
def copies_share_the_models_weights() -> Iterator[None]:
    """Training changes the model itself, so that verification uses changed weights."""
    real = copy.deepcopy
    with patch.object(
        copy,
        "deepcopy",
        lambda thing, *memo: thing if isinstance(thing, nn.Module) else real(thing, *memo),
    ):
        yield
