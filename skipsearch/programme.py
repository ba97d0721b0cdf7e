"""CLaSp's dynamic programme: which steps of a model to skip so that the residual stream stays closest to the full model's.

Steps are whole layers or sub-layers. The programme sees no model: `probe` runs one step on hidden states. The searcher `clasp` solves it
over calibration text, the drafter `clasp` on one token while it decodes. Source: CLaSp, eq. 2 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

Probe = Callable[[int, Tensor, bool, bool], Tensor]

SMALLEST = 1e-8     # of a length that is divided by
SEQUENTIAL = 0.02   # relative error up to which attention, then MLP, is the layer (16-bit rounding makes under 0.01)


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the programme: what of a layer runs, and whether that may be skipped instead."""

    layer: int
    attn: bool
    mlp: bool
    free: bool

    @property
    def sublayers(self) -> tuple[int, ...]:
        return (2 * self.layer,) * self.attn + (2 * self.layer + 1,) * self.mlp


@dataclass(frozen=True)
class Programme:
    """A solved programme: for each step, whether to skip it when j steps up to and with it are skipped.

    by_mean[i] is [j + 1, 1], by_position[i] [j + 1, N]; a step that must run has None.
    """

    steps: Sequence[Step]
    by_mean: Sequence[Tensor | None]
    by_position: Sequence[Tensor | None]

    @property
    def n_free(self) -> int:
        return sum(step.free for step in self.steps)

    def shared(self, count: int) -> set[int]:
        """The flat sub-layers of `count` steps, decided on the mean over positions."""
        return self._named([s for s, skips in enumerate(backtrack(self.by_mean, count)[:, 0]) if skips])

    def counted(self, count: int) -> set[int]:
        """The flat sub-layers of the `count` steps that most positions skip; of equals the earlier."""
        votes = backtrack(self.by_position, count).sum(dim=1).tolist()
        free = [s for s, step in enumerate(self.steps) if step.free]
        return self._named(sorted(free, key=lambda s: (-votes[s], s))[:count])

    def _named(self, chosen: Sequence[int]) -> set[int]:
        return {sublayer for s in chosen for sublayer in self.steps[s].sublayers}


@torch.no_grad()
def solve(states: Tensor, steps: Sequence[Step], probe: Probe) -> Programme | None:
    """Both programmes at once, all j of one step in one probe call; None if the steps do not add up to the layers.

    states: [L + 1, N, H], the full model's. The row j = 0 has skipped nothing, so it is the full model's state, also between
    the attention and the MLP of a layer.
    """
    shared = each = states[:1]   # g(i, ·) of the two, [j, N, H]
    by_mean: list[Tensor | None] = []
    by_position: list[Tensor | None] = []
    for step in steps:
        shared_run, each_run = probe(step.layer, torch.cat([shared, each]), step.attn, step.mlp).chunk(2)
        if step.mlp:
            if not same(shared_run[0], states[step.layer + 1]):
                return None
            shared_run, each_run = (torch.cat([states[step.layer + 1][None], run[1:]]) for run in (shared_run, each_run))
        if not step.free:
            shared, each = shared_run, each_run
            by_mean.append(None)
            by_position.append(None)
            continue
        full = shared_run[0]
        skips = _better_skipped(shared_run, shared, full).mean(dim=1, keepdim=True) >= 0
        by_mean.append(skips)
        shared = _follow(skips, shared_run, shared)
        skips = _better_skipped(each_run, each, full) >= 0
        by_position.append(skips)
        each = _follow(skips, each_run, each)
    return Programme(steps, by_mean, by_position)


@torch.no_grad()
def solve_token(states: Tensor, steps: Sequence[Step], run: Probe, count: int) -> list[Step]:
    """The `count` free steps to skip for one token; fewer where there are not so many.

    states: [L + 1, H], the full model's. run(layer, rows [R, H], attn, mlp) -> [R, H]: the step on states that stand in the token's place,
    always of min(count, free steps) + 1 rows, of which only the first j + 1 are used where j steps can have been skipped. A tie skips.
    Source: CLaSp, eq. 2 and algorithm 1.
    """
    count = min(count, sum(step.free for step in steps))
    rows = states[:1].expand(count + 1, -1)   # g(i, 0…count); row 0 has skipped nothing, so it is the full model's state
    known, skips = 1, list[Tensor | None]()   # rows that mean something
    for step in steps:
        ran = run(step.layer, rows, step.attn, step.mlp)
        full = states[step.layer + 1] if step.mlp else ran[0]
        ran = torch.cat([full[None], ran[1:]])
        if not step.free:
            rows = ran
            skips.append(None)
            continue
        both, to = torch.cat([ran[1:], rows[:-1]]), full                  # [2 · count, H]
        if both.dtype.itemsize < 4:
            both, to = both.float(), to.float()
        # The cosine but for the length of `to`, which both sides share: a quarter of the calls of `cosine_similarity`.
        by_run, by_skip = ((both * to).sum(-1) / both.norm(dim=-1).clamp_min(SMALLEST)).chunk(2)
        skipped = by_skip >= by_run                                       # [count]: of g(i, 1…count)
        if known <= count:
            skipped[known - 1:] = True                                    # all steps so far are skipped
        skips.append(torch.cat([skipped.new_zeros(1), skipped])[:, None])
        rows = torch.cat([full[None], torch.where(skipped[:, None], rows[:-1], ran[1:])])
        known = min(known + 1, count + 1)
    return [step for step, skip in zip(steps, backtrack(skips, count)[:, 0].tolist(), strict=True) if skip]


def _better_skipped(run: Tensor, kept: Tensor, full: Tensor) -> Tensor:
    """[j + 1, N]: cosine to the full state with j skipped if this step is, less that if it runs. run, kept: [j, N, H]."""
    impossible = full.new_full((1, full.shape[0]), 3.0, dtype=torch.float)   # no difference of two cosines reaches it
    by_run, by_skip = (cosine_similarity(g.float(), full.float()[None], dim=-1) for g in (run, kept))
    # with none skipped the step ran; with all skipped it did not
    return torch.cat([-impossible, by_skip[:-1] - by_run[1:], impossible])


def _follow(skips: Tensor, run: Tensor, kept: Tensor) -> Tensor:
    """g(i, ·) [j + 1, N, H] from g(i - 1, ·): one more row, since one more step can be skipped."""
    return torch.where(skips[..., None], torch.cat([kept[:1], kept]), torch.cat([run, run[-1:]]))


def backtrack(skips: Sequence[Tensor | None], count: int) -> Tensor:
    """[steps, N] bool: the steps that each position skips when it skips `count` of them."""
    width = next((row.shape[1] for row in skips if row is not None), 1)
    left = torch.full((width,), count)
    path = torch.zeros(len(skips), width, dtype=torch.bool)
    for s, row in reversed(list(enumerate(skips))):
        if row is not None:
            path[s] = row.cpu()[left, torch.arange(width)]
            left = left - path[s].long()
    return path


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two states differ by rounding alone."""
    return bool((a.float() - b.float()).norm() <= SEQUENTIAL * b.float().norm())
