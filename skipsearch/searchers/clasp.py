"""`clasp`: a dynamic programme over hidden states that keeps the draft's residual stream close to the full model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from skipsearch.errors import SearchError
from skipsearch.mask import SkipMask
from skipsearch.searchers.base import SearchProblem, required
from skipsearch.searchers.ranked import RankedSearcher, coarse_to_fine

Probe = Callable[[int, Tensor, bool, bool], Tensor]

SEQUENTIAL = 0.02   # relative error up to which attention, then MLP, is the layer (16-bit rounding makes under 0.01)


class CLaSp(RankedSearcher):
    """For every number of skipped layers, and of skipped sub-layers, those whose absence turns the hidden states least.

    D(i, j) = max{cos(h_i, g(i-1, j-1)), cos(h_i, f_i(g(i-1, j)))}: the state after i layers with j of them skipped either leaves
    layer i out or runs it, whichever stays nearer to the full model's h_i. The paper runs this on one token while decoding. Here
    it runs on all positions of the calibration text, and one set for all comes out in two ways: every (i, j) decided for all
    positions together by their mean cosine ("shared"), or each position deciding for itself and the layers it skips most often
    taken ("counted"). Each is done on layers, as in the paper, and on sub-layers where attention and MLP follow one another (in a
    parallel residual neither has a state of its own behind it). Counts go coarse to fine, the four ways in turn.
    Raises: SearchError without evidence.states or evidence.probe, and from the first `ask` if the two do not belong together.
    Source: CLaSp, eq. 2 and algorithm 1.
    """

    def masks(self, problem: SearchProblem) -> Iterator[SkipMask]:
        states = required(problem.evidence.states, "states", "clasp")
        probe = required(problem.evidence.probe, "probe", "clasp")
        return _sweep(problem, states, probe)


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


def layer_steps(problem: SearchProblem) -> list[Step]:
    return [Step(i, True, True, not problem.never_skip & {2 * i, 2 * i + 1}) for i in range(problem.n_layers)]


def sublayer_steps(problem: SearchProblem) -> list[Step]:
    return [Step(s // 2, not s % 2, bool(s % 2), s not in problem.never_skip) for s in range(2 * problem.n_layers)]


def _sweep(problem: SearchProblem, states: Tensor, probe: Probe) -> Iterator[SkipMask]:
    by_layer = solve(states, layer_steps(problem), probe)
    if by_layer is None:
        raise SearchError("evidence.probe does not lead from one of evidence.states to the next; take both from the same full pass")
    by_sublayer = None if problem.whole_layers else solve(states, sublayer_steps(problem), probe)
    ways = [[SkipMask.from_sublayers(problem.n_layers, skipped(count)) for count in coarse_to_fine(programme.n_free)]
            for programme in (by_sublayer, by_layer) if programme for skipped in (programme.shared, programme.counted)]
    yield from (mask for mask in chain.from_iterable(zip_longest(*ways)) if mask is not None)


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
            if not _same(shared_run[0], states[step.layer + 1]):
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


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a.float() - b.float()).norm() <= SEQUENTIAL * b.float().norm())
