"""Many draft policies over the same rounds at once: the same counts as `simulate`, policy for policy.

What a policy without memory does at an anchor depends on the anchor alone, so every round is worked out once and only the walk from anchor
to anchor is left, all prompts and policies in step. Lookups have no memory either: what they propose at an anchor follows from the text.
A policy that learns starts anew at each prompt, so there each prompt of each policy is a walker of its own, and all of them go in step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skipsearch.costs import Costs
from skipsearch.errors import SearchError
from skipsearch.evaluation.lookups import Copied
from skipsearch.evaluation.rounds import Rounds
from skipsearch.evaluation.simulate import simulate
from skipsearch.exits import DraftPolicy, Exit
from skipsearch.exits.base import LearningExits
from skipsearch.mask import SkipMask
from skipsearch.names import resolve
from skipsearch.recipe import EXITS, Siblings

LENGTHS = (2, 3, 4, 6, 8, 12, 16)   # that exits with a condition are tried at while masks are searched


class _Fixed:
    """The rounds that lookups take, whatever the policy behind them: tokens drafted [A], 0 where the policy is asked; tokens accepted [A];
    seconds [A]."""

    def __init__(self, rounds: Rounds, before: Sequence[Copied], costs: Costs):
        self.drafted = np.zeros(len(rounds.room), dtype=int)
        right = self.drafted.copy()
        for copied in before:   # the first that proposes something drafts
            free = self.drafted == 0
            self.drafted = np.where(free, np.clip(copied.offered, 0, np.maximum(rounds.room, 0)), self.drafted)
            right = np.where(free, copied.right, right)
        self.accepted = np.minimum(right, self.drafted)
        self.seconds = np.array(costs.rounds(None, rounds.longest))[self.drafted]


def sweep(rounds: Rounds, mask: SkipMask, policies: Sequence[DraftPolicy], costs: Costs, before: Sequence[Copied] = ()) -> np.ndarray:
    """Predicted decode seconds [policies, prompts]. before: the lookups that are asked before the skip drafter, in order."""
    fixed = _Fixed(rounds, before, costs)
    seconds = np.empty((len(policies), len(rounds.first)))
    stops: dict[Exit, np.ndarray] = {}
    for exit_policy in {p.exit for p in policies if not p.exit.shared}:
        if (found := exit_policy.stops(rounds.confidence)) is not None:
            stops[exit_policy] = found
    memoryless = [i for i, p in enumerate(policies) if p.exit in stops]
    if memoryless:
        for siblings in {policies[i].siblings for i in memoryless}:
            alike = [i for i in memoryless if policies[i].siblings == siblings]
            seconds[alike] = _memoryless(rounds, [policies[i] for i in alike], stops, _Beside(rounds, mask, siblings, costs), fixed)
    left = [i for i, p in enumerate(policies) if p.exit not in stops]
    for kind in {type(policies[i].exit) for i in left}:
        chosen = [i for i in left if type(policies[i].exit) is kind and not policies[i].exit.shared and policies[i].siblings is None]
        walkers = kind.learning([policies[i].exit for i in chosen for _ in rounds.first]) if chosen else None
        if walkers is not None:
            beside = _Beside(rounds, mask, None, costs)
            seconds[chosen] = _learning(rounds, [policies[i].draft_length for i in chosen], walkers, beside, fixed)
            left = [i for i in left if i not in set(chosen)]
    for i in left:
        seconds[i] = simulate(rounds, mask, policies[i], costs, before).seconds
    return seconds


def sweep_lookups(rounds: Rounds, options: Sequence[Copied], costs: Costs) -> np.ndarray:
    """Predicted decode seconds [options, prompts] of each lookup alone."""
    fixed = [_Fixed(rounds, [copied], costs) for copied in options]
    return _walked(rounds, np.stack([f.accepted for f in fixed]), np.stack([f.seconds for f in fixed]))


class _Beside:
    """What the rounds of a skip drafter cost and bring, siblings beside its unsure tokens included."""

    def __init__(self, rounds: Rounds, mask: SkipMask | None, siblings: Siblings | None, costs: Costs):
        self.right, self.most = rounds.right, siblings.most if siblings else 0
        self.price = np.array(costs.trees(mask, rounds.longest, self.most * rounds.longest))   # [siblings + 1, K + 1]
        unsure = rounds.confidence < (siblings.below if siblings else 0)
        self.unsure = np.pad(unsure.cumsum(axis=1), ((0, 0), (1, 0)))                          # [A, K + 1]: of the first so many tokens
        first_wrong = np.pad(unsure, ((0, 0), (0, 1)))[np.arange(len(rounds.right)), rounds.right]
        self.saved = first_wrong & (rounds.sibling > 0) & (rounds.sibling <= self.most)   # [A]: one stands at the first wrong token

    def accepted(self, anchors: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """drafted [..., R] at anchors [R] -> [..., R]."""
        right = self.right[anchors]
        return np.where(right < drafted, right + self.saved[anchors], drafted)

    def seconds(self, anchors: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """As `accepted`."""
        return self.price[self.most * self.unsure[anchors, drafted], drafted]


def _memoryless(rounds: Rounds, policies: Sequence[DraftPolicy], stops: dict[Exit, np.ndarray], beside: _Beside,
                fixed: _Fixed) -> np.ndarray:
    most = np.minimum([[min(p.draft_length, rounds.longest)] for p in policies], rounds.room)   # [P, A]
    drafted = np.minimum(np.stack([stops[p.exit] for p in policies]), most)
    asked = fixed.drafted == 0
    anchors = np.arange(len(rounds.right))
    accepted = np.where(asked, beside.accepted(anchors, drafted), fixed.accepted)
    return _walked(rounds, accepted, np.where(asked, beside.seconds(anchors, drafted), fixed.seconds))


def _walked(rounds: Rounds, accepted: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """From anchor to anchor. accepted, seconds: [P, A] of the round that starts at each anchor -> seconds [P, prompts]."""
    n_policies, n_anchors = accepted.shape
    end = np.repeat(rounds.first + rounds.lengths, rounds.lengths)
    following = np.arange(n_anchors) + accepted + 1
    # Behind the last anchor stands one more, where every walk comes to rest for nothing.
    following = np.pad(np.where(following < end, following, n_anchors), ((0, 0), (0, 1)), constant_values=n_anchors).ravel()
    spent = np.pad(seconds, ((0, 0), (0, 1))).ravel()
    row = (np.arange(n_policies) * (n_anchors + 1))[:, None]
    at = np.broadcast_to(rounds.first, (n_policies, len(rounds.first)))
    total = np.zeros(at.shape)
    while (at < n_anchors).any():
        total += spent[row + at]
        at = following[row + at]
    return total


def _learning(rounds: Rounds, lengths: Sequence[int], walkers: LearningExits, beside: _Beside, fixed: _Fixed) -> np.ndarray:
    """One walker for each prompt of each policy, in that order."""
    n_prompts = len(rounds.first)
    length = np.minimum(np.repeat(lengths, n_prompts), rounds.longest)
    at, end = np.tile(rounds.first, len(lengths)), np.tile(rounds.first + rounds.lengths, len(lengths))
    seconds = np.zeros(len(at))
    walking = np.flatnonzero(at < end)
    while len(walking):
        a = at[walking]
        asked = fixed.drafted[a] == 0
        most = np.minimum(length[walking], rounds.room[a])
        drafted = np.where(asked, np.minimum(walkers.stops(walking, rounds.confidence[a]), most), 0)
        accepted = np.where(asked, beside.accepted(a, drafted), fixed.accepted[a])
        seconds[walking] += np.where(asked, beside.seconds(a, drafted), fixed.seconds[a])
        at[walking] = a + accepted + 1
        told = drafted > 0   # a round that somebody else drafted, or that had no room, says nothing
        walkers.observe(walking[told], accepted[told], drafted[told])
        walking = walking[at[walking] < end[walking]]
    return seconds.reshape(len(lengths), n_prompts)


def has_no_memory(policy: DraftPolicy) -> bool:
    """Whether what it does in a round depends on that round alone."""
    return policy.exit.stops(np.zeros((1, 1))) is not None


def sibling_grid() -> list[Siblings]:
    """What the best draft policies of a mask are tried with."""
    return [Siblings(below=below / 10, most=most) for below in (2, 3, 4, 5, 6, 7, 8, 9, 10) for most in (1, 2, 3)]


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
            remembers = not has_no_memory(DraftPolicy(1, exit_policy))
            of_kind = {min(n, max_draft) for n in (4, 8, 12)} if remembers else lengths if exit_policy.reads_confidence else \
                range(1, max_draft + 1)
            found += [DraftPolicy(length, exit_policy) for length in sorted(of_kind)]
    return found
