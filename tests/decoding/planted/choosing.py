"""Bugs of masks chosen while decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from decoding.dynamic_mask_checks import (
    check_asd,
    check_choosing,
    check_clasp,
    check_swift,
    check_swift_as_published,
)
from skipsearch.drafters import DecodeContext
from skipsearch.drafters.asd.session import ASDPolicy
from skipsearch.drafters.asd.spec import ASD
from skipsearch.drafters.clasp import dynamic_program
from skipsearch.drafters.clasp import session as clasp_session
from skipsearch.drafters.clasp.session import CLaSpPolicy
from skipsearch.drafters.dynamic_mask import DynamicMaskSession
from skipsearch.drafters.swift.session import SWIFTPolicy
from skipsearch.models.kv_cache import Planner

from .register import caught_by, planted


@caught_by(check_clasp)
def token_that_is_planned_for_sees_itself_twice() -> Iterator[None]:
    """The committed slot of the token is visible together with the row in its place."""
    real = Planner.plan_replay
    with patch.object(
        Planner,
        "plan_replay",
        lambda self, start, positions, anchors, groups: real(
            self, start, positions, anchors + 1, groups
        ),
    ):
        yield


@caught_by(check_clasp)
def states_of_a_plan_see_each_other() -> Iterator[None]:
    real = Planner.plan_replay
    with patch.object(
        Planner,
        "plan_replay",
        lambda self, start, positions, anchors, groups: real(
            self, start, positions, anchors, torch.zeros_like(groups)
        ),
    ):
        yield


@planted(check_clasp, CLaSpPolicy, "_plan_mask")
def plan_from_a_rejected_row(real, self, ctx, row):
    """The states are those of the last row of the verify pass, also if it was rejected."""
    return real(self, ctx, self.hidden_states[0].shape[1] - 1)


@planted(check_clasp, CLaSpPolicy, "next_mask")
def plan_that_is_late(real, self, ctx, path):
    """A plan is made one round late."""
    before = self.since_last_plan
    found = real(self, ctx, path)
    if found is not None:
        self.since_last_plan = before - self.spec.interval
    return found


@planted(check_asd, ASDPolicy, "tap")
def branch_compared_without_its_residual(real, self, model, cache, plan, rows):
    look = real(self, model, cache, plan, rows)

    def of_branches(i: int, h: Tensor) -> Any:
        between = look(i, h) if look else None
        return between and (lambda behind: between(behind - h))

    return of_branches


@planted(check_asd, ASDPolicy, "initial_mask")
def layers_counted_from_0(real, self, ctx):
    mask = real(self, ctx)
    every = {
        i
        for i in range(mask.n_layers - self.spec.keep_last)
        if self.spec.every and i % self.spec.every == 0
    }
    return replace(mask, attn=tuple(sorted({*mask.attn, *every})), mlp=tuple(sorted(every)))


@caught_by(check_asd)
def mask_of_the_request_before() -> Iterator[None]:
    kept: dict[ASD, Any] = {}
    real = ASDPolicy.initial_mask

    def first(self: ASDPolicy, ctx: DecodeContext) -> Any:
        return kept.setdefault(self.spec, real(self, ctx))

    with patch.object(ASDPolicy, "initial_mask", first):
        yield


@caught_by(check_asd)
def generated_tokens_in_the_mean() -> Iterator[None]:
    """The cosines of the generated text change the mask, which must depend on the prompt alone."""
    real = ASDPolicy.tap

    def tap(self: ASDPolicy, *of_the_pass: Any) -> Any:
        self.decided = False
        return real(self, *of_the_pass)

    with (
        patch.object(ASDPolicy, "tap", tap),
        patch.object(ASDPolicy, "next_mask", lambda self, ctx, path: self.select_mask(self.spec)),
    ):
        yield


@caught_by(check_clasp)
def states_of_the_thinned_model() -> Iterator[None]:
    """The plan compares with the model under the previous mask, and not with the full model."""
    real, skipped = dynamic_program.solve_one_token, list[Any]()

    def solve(states: Tensor, steps: Any, run: Any, count: int) -> Any:
        rows = states.clone()
        for step in steps:
            before = rows[step.layer]
            rows[step.layer + 1] = (
                before
                if step in skipped
                else run(step.layer, before.expand(count + 1, -1), step.attn, step.mlp)[0]
            )
        skipped[:] = real(rows, steps, run, count)
        return list(skipped)

    with patch.object(clasp_session, "solve_one_token", solve):
        yield


@caught_by(check_swift_as_published)
def latest_tokens_judged_as_published() -> Iterator[None]:
    """The published rule reads the first tokens after the prompt."""
    with patch.object(SWIFTPolicy, "_score_first", SWIFTPolicy._score_recent):
        yield


@planted(check_swift_as_published, SWIFTPolicy, "_run_trial")
def mask_at_the_start_judged_as_published(real, self, ctx):
    """The published search has no score of its first mask."""
    stream = self.drafter.search
    if not stream.n_judged:
        stream.n_correct, stream.n_judged = (
            self._score_first(ctx, stream.mask),
            self.drafter.spec.window,
        )
    real(self, ctx)


@planted(check_asd, ASDPolicy, "tap")
def padding_in_the_mean(real, self, model, cache, plan, rows):
    """Rows that only pad a pass count as prompt."""
    return real(self, model, cache, plan, plan.positions.shape[1])


@caught_by(check_swift)
def tried_tokens_see_each_other() -> Iterator[None]:
    """Masks are judged with the draft's own K/V instead of the full model's."""
    real = Planner.plan_replay
    with patch.object(
        Planner,
        "plan_replay",
        lambda self, start, positions, anchors, groups: real(
            self, start, positions, anchors * 0 + anchors.min(), torch.zeros_like(groups)
        ),
    ):
        yield


@planted(check_choosing, Planner, "plan_replay")
def trial_written_over_the_text(real, self, start, positions, anchors, groups):
    """The rows of a trial are written to the slots of the text."""
    plan = real(self, start, positions, anchors, groups)
    return replace(plan, slots=positions, first_slot=None)


@planted(check_choosing, DynamicMaskSession, "committed")
def mask_changed_within_a_round(real, self, ctx, path):
    """A mask is chosen within a draft, and its K/V are taken for the full model's."""
    real(self, ctx, path)
    ctx.cache.length += self.mask_history[-1][0] == self.n_rounds
