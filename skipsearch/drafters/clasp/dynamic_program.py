"""CLaSp's dynamic program: choose the steps of a model to skip with the least change of its output.

Steps are layers or sub-layers. The change is the cosine between the draft's residual stream and the
full model's. The program does not access a model: `run_step` runs one step on hidden states. The
searcher `clasp` solves the program over calibration text, and the drafter `clasp` for one token
during decoding. g(i, j) is the best state after step i with j steps skipped.

Source: CLaSp, eq. 2 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

LayerProbe = Callable[[int, Tensor, bool, bool], Tensor]

MIN_NORM = 1e-8  # avoids a division by zero
# Relative error up to which two states count as equal; rounding in 16 bits causes less than 0.01.
ROUNDING_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class DPStep:
    """A step of the program, which is run or skipped as a whole: a layer or a sub-layer."""

    layer: int
    attn: bool  # whether the step contains the attention
    mlp: bool  # whether the step contains the MLP
    skippable: bool

    @property
    def sublayers(self) -> tuple[int, ...]:
        return (2 * self.layer,) * self.attn + (2 * self.layer + 1,) * self.mlp


@dataclass(frozen=True)
class SolvedProgram:
    """The solution of a dynamic program, for all numbers of skipped steps.

    For step i and count j, it stores whether step i is skipped on the best path that skips j of the
    steps 0 … i.
    """

    steps: Sequence[DPStep]
    skips_by_mean: Sequence[Tensor | None]  # by step, [j + 1, 1]; None: the step must run
    skips_by_position: Sequence[Tensor | None]  # by step, [j + 1, N]; None: the step must run

    @property
    def n_skippable(self) -> int:
        return sum(step.skippable for step in self.steps)

    def solve_by_mean(self, count: int) -> set[int]:
        """Return the sub-layers to skip if `count` steps are skipped, by the mean cosine.

        They are flat indices: 2 · layer for attention, 2 · layer + 1 for the MLP. The steps are
        those that the best path skips, by the mean cosine over positions.
        """
        return self._sublayers_of(
            [s for s, skips in enumerate(backtrack_skips(self.skips_by_mean, count)[:, 0]) if skips]
        )

    def solve_by_votes(self, count: int) -> set[int]:
        """Return the sub-layers to skip: those of the `count` steps with the most votes.

        They are flat indices, as in `solve_by_mean`. Each position votes for the steps that its
        best path skips. Ties go to earlier steps.
        """
        votes = backtrack_skips(self.skips_by_position, count).sum(dim=1).tolist()
        skippable = [s for s, step in enumerate(self.steps) if step.skippable]
        return self._sublayers_of(sorted(skippable, key=lambda s: (-votes[s], s))[:count])

    def _sublayers_of(self, step_indices: Sequence[int]) -> set[int]:
        return {sublayer for s in step_indices for sublayer in self.steps[s].sublayers}


@torch.no_grad()
def solve_mean_and_votes(
    hidden_states: Tensor, steps: Sequence[DPStep], run_step: LayerProbe
) -> SolvedProgram | None:
    """Solve the program twice: by the mean cosine over positions, and for each position alone.

    Each step takes one call of `run_step`, for both programs and all numbers of skipped steps.
    hidden_states: the full model's, [L + 1, N, H]. Row j = 0 of a program skips nothing, so it is
    the full model's state, also between the attention and the MLP of a layer. Returns None if
    `run_step` does not lead from one of `hidden_states` to the next.
    """
    mean_states = position_states = hidden_states[:1]  # g(i, ·) of both programs, [j, N, H]
    by_mean: list[Tensor | None] = []
    by_position: list[Tensor | None] = []
    for step in steps:
        mean_run, position_run = run_step(
            step.layer, torch.cat([mean_states, position_states]), step.attn, step.mlp
        ).chunk(2)
        if step.mlp:
            if not nearly_equal(mean_run[0], hidden_states[step.layer + 1]):
                return None
            mean_run, position_run = (
                torch.cat([hidden_states[step.layer + 1][None], run[1:]])
                for run in (mean_run, position_run)
            )
        if not step.skippable:
            mean_states, position_states = mean_run, position_run
            by_mean.append(None)
            by_position.append(None)
            continue
        full = mean_run[0]
        skips = _skip_advantage(mean_run, mean_states, full).mean(dim=1, keepdim=True) >= 0
        by_mean.append(skips)
        mean_states = _advance(skips, mean_run, mean_states)
        skips = _skip_advantage(position_run, position_states, full) >= 0
        by_position.append(skips)
        position_states = _advance(skips, position_run, position_states)
    return SolvedProgram(steps, by_mean, by_position)


@torch.no_grad()
def solve_one_token(
    hidden_states: Tensor, steps: Sequence[DPStep], run_step: LayerProbe, count: int
) -> list[DPStep]:
    """Return the `count` steps to skip for one token, or all skippable steps if there are fewer.

    hidden_states: the full model's, [L + 1, H].
    run_step(layer, rows [R, H], attn, mlp) returns the output of the step, [R, H], for states at
    the token's position. R is always min(count, skippable steps) + 1. If the steps before this one
    can skip only j, only the first j + 1 rows are valid.
    In a tie, the step is skipped.
    """
    count = min(count, sum(step.skippable for step in steps))
    # g(i, 0…count). Row 0 skips nothing, so it is the full model's state.
    rows = hidden_states[:1].expand(count + 1, -1)
    n_used, skips = 1, list[Tensor | None]()
    for step in steps:
        run_states = run_step(step.layer, rows, step.attn, step.mlp)
        full = hidden_states[step.layer + 1] if step.mlp else run_states[0]
        run_states = torch.cat([full[None], run_states[1:]])
        if not step.skippable:
            rows = run_states
            skips.append(None)
            continue
        options, target = torch.cat([run_states[1:], rows[:-1]]), full  # [2 · count, H]
        if options.dtype.itemsize < 4:
            options, target = options.float(), target.float()
        # The cosine without division by the length of `target`, which both sides share. It makes a
        # quarter of the kernel calls of `cosine_similarity`.
        cosines = (options * target).sum(-1) / options.norm(dim=-1).clamp_min(MIN_NORM)
        by_run, by_skip = cosines.chunk(2)
        skipped = by_skip >= by_run  # [count]: for g(i, 1…count)
        if n_used <= count:
            skipped[n_used - 1 :] = True  # all steps so far are skipped
        skips.append(torch.cat([skipped.new_zeros(1), skipped])[:, None])
        rows = torch.cat([full[None], torch.where(skipped[:, None], rows[:-1], run_states[1:])])
        n_used = min(n_used + 1, count + 1)
    return [
        step
        for step, skip in zip(steps, backtrack_skips(skips, count)[:, 0].tolist(), strict=True)
        if skip
    ]


def _skip_advantage(run: Tensor, skipped: Tensor, full: Tensor) -> Tensor:
    """Return the cosine if this step is skipped, minus the cosine if it runs, [j + 1, N].

    The cosines are to the full model's state. Row j compares both ways to have j steps skipped
    after this step. run, skipped: the states if the step runs or is skipped, [j, N, H].
    """
    # A value that no difference of two cosines reaches.
    impossible = full.new_full((1, full.shape[0]), 3.0, dtype=torch.float)
    by_run, by_skip = (
        cosine_similarity(g.float(), full.float()[None], dim=-1) for g in (run, skipped)
    )
    # With no step skipped, this step runs; with all steps skipped, it does not.
    return torch.cat([-impossible, by_skip[:-1] - by_run[1:], impossible])


def _advance(skips: Tensor, run: Tensor, skipped: Tensor) -> Tensor:
    """Return the states g(i, ·), [j + 1, N, H], from g(i − 1, ·), [j, N, H].

    skips: whether step i is skipped. run, skipped: the states if it runs or is skipped.
    """
    return torch.where(
        skips[..., None], torch.cat([skipped[:1], skipped]), torch.cat([run, run[-1:]])
    )


def backtrack_skips(skips: Sequence[Tensor | None], count: int) -> Tensor:
    """Return the steps that each position skips, [steps, N] bool.

    count: how many steps each position skips.
    """
    width = next((row.shape[1] for row in skips if row is not None), 1)
    remaining = torch.full((width,), count)
    path = torch.zeros(len(skips), width, dtype=torch.bool)
    for s, row in reversed(list(enumerate(skips))):
        if row is not None:
            path[s] = row.cpu()[remaining, torch.arange(width)]
            remaining = remaining - path[s].long()
    return path


def nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two states differ by rounding alone."""
    return bool((a.float() - b.float()).norm() <= ROUNDING_TOLERANCE * b.float().norm())
