"""Many draft policies over the same rounds at once: the same counts as `simulate`, policy for policy.

What a policy without memory does at an anchor depends on the anchor alone, so every round is worked out once and only the walk from anchor
to anchor is left, all prompts and policies in step. A policy that learns starts anew at each prompt, so there each prompt of each policy is
a walker of its own, and all of them go in step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skipsearch.costs import Costs
from skipsearch.errors import SearchError
from skipsearch.evaluation.rounds import Rounds
from skipsearch.evaluation.simulate import simulate
from skipsearch.exits import DraftPolicy, Exit
from skipsearch.exits.base import LearningExits
from skipsearch.mask import SkipMask
from skipsearch.names import resolve
from skipsearch.recipe import EXITS

LENGTHS = (2, 3, 4, 6, 8, 12, 16)   # that exits with a condition are tried at while masks are searched


def sweep(rounds: Rounds, mask: SkipMask, policies: Sequence[DraftPolicy], costs: Costs) -> np.ndarray:
    """Predicted decode seconds [policies, prompts]."""
    price = np.array(costs.rounds(mask, rounds.longest))
    seconds = np.empty((len(policies), len(rounds.first)))
    stops: dict[Exit, np.ndarray] = {}
    for exit_policy in {p.exit for p in policies if not p.exit.shared}:
        if (found := exit_policy.stops(rounds.confidence)) is not None:
            stops[exit_policy] = found
    left = list(range(len(policies)))
    memoryless = [i for i in left if policies[i].exit in stops]
    if memoryless:
        seconds[memoryless] = _memoryless(rounds, [policies[i] for i in memoryless], stops, price)
    left = [i for i in left if i not in set(memoryless)]
    for kind in {type(policies[i].exit) for i in left if not policies[i].exit.shared}:
        chosen = [i for i in left if type(policies[i].exit) is kind and not policies[i].exit.shared]
        walkers = kind.learning([policies[i].exit for i in chosen for _ in rounds.first])
        if walkers is not None:
            seconds[chosen] = _learning(rounds, [policies[i].draft_length for i in chosen], walkers, price)
            left = [i for i in left if i not in set(chosen)]
    for i in left:
        seconds[i] = simulate(rounds, mask, policies[i].exit, policies[i].draft_length, costs).seconds
    return seconds


def _memoryless(rounds: Rounds, policies: Sequence[DraftPolicy], stops: dict[Exit, np.ndarray], price: np.ndarray) -> np.ndarray:
    """price [K + 1]: seconds of a round with so many drafted tokens."""
    most = np.minimum([[min(p.draft_length, rounds.longest)] for p in policies], rounds.room)   # [P, A]
    drafted = np.minimum(np.stack([stops[p.exit] for p in policies]), most)
    accepted = np.minimum(rounds.right, drafted)
    n_policies, n_anchors = drafted.shape
    end = np.repeat(rounds.first + rounds.lengths, rounds.lengths)
    following = np.arange(n_anchors) + accepted + 1
    # Behind the last anchor stands one more, where every walk comes to rest for nothing.
    following = np.pad(np.where(following < end, following, n_anchors), ((0, 0), (0, 1)), constant_values=n_anchors).ravel()
    spent = np.pad(price[drafted], ((0, 0), (0, 1))).ravel()
    row = (np.arange(n_policies) * (n_anchors + 1))[:, None]
    at = np.broadcast_to(rounds.first, (n_policies, len(rounds.first)))
    seconds = np.zeros(at.shape)
    while (at < n_anchors).any():
        seconds += spent[row + at]
        at = following[row + at]
    return seconds


def _learning(rounds: Rounds, lengths: Sequence[int], walkers: LearningExits, price: np.ndarray) -> np.ndarray:
    """One walker for each prompt of each policy, in that order."""
    n_prompts = len(rounds.first)
    length = np.minimum(np.repeat(lengths, n_prompts), rounds.longest)
    at, end = np.tile(rounds.first, len(lengths)), np.tile(rounds.first + rounds.lengths, len(lengths))
    seconds = np.zeros(len(at))
    walking = np.flatnonzero(at < end)
    while len(walking):
        a = at[walking]
        most = np.minimum(length[walking], rounds.room[a])
        drafted = np.minimum(walkers.stops(walking, rounds.confidence[a]), most)
        accepted = np.minimum(rounds.right[a], drafted)
        seconds[walking] += price[drafted]
        at[walking] = a + accepted + 1
        told = drafted > 0   # a round without room drafts nothing, and says nothing
        walkers.observe(walking[told], accepted[told], drafted[told])
        walking = walking[at[walking] < end[walking]]
    return seconds.reshape(len(lengths), n_prompts)


def exploring(max_draft: int) -> list[DraftPolicy]:
    """The policies that a mask is judged by while masks are searched."""
    return _policies(max_draft, [length for length in LENGTHS if length <= max_draft], fine=False)


def every(max_draft: int) -> list[DraftPolicy]:
    """The policies that the best masks are given: more lengths, finer settings."""
    return _policies(max_draft, range(2, max_draft + 1), fine=True)


def _policies(max_draft: int, lengths: Sequence[int], fine: bool) -> list[DraftPolicy]:
    """Every kind's own grid; one that reads confidence at these lengths, one that learns at three of them, others at every length."""
    found = []
    for name in EXITS:
        for exit_policy in resolve("exit policy", name, EXITS, SearchError).grid(fine):
            learns = exit_policy.stops(np.zeros((1, 1))) is None
            of_kind = {min(n, max_draft) for n in (4, 8, 12)} if learns else lengths if exit_policy.reads_confidence else \
                range(1, max_draft + 1)
            found += [DraftPolicy(length, exit_policy) for length in sorted(of_kind)]
    return found
