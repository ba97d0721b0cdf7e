"""Predict decode time for many draft policies at once.

A round of a memoryless policy depends only on the position at which it starts. We therefore
tabulate one round per (policy, position), then jump from round to round with array indexing, for
all prompts and policies together. Lookups are memoryless, too: their proposals depend on the text
alone. An adaptive policy has a state that is reset at each prompt. For such policies, each prompt
of each policy is a walker, and all walkers advance together. `simulate` does the same for one
policy, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.recipe import EXITS, Siblings
from skipsearch.core.registry import resolve_name
from skipsearch.drafters.exits import DraftPolicy, Exit
from skipsearch.drafters.exits.exit_base import BatchedExits
from skipsearch.errors import SearchError
from skipsearch.replay.lookup_replay import LookupProposals
from skipsearch.replay.rounds import RoundTable
from skipsearch.replay.simulate import simulate

# Draft lengths of exits that read confidence, while masks are searched.
COARSE_DRAFT_LENGTHS = (2, 3, 4, 6, 8, 12, 16)


class _LookupRounds:
    """The rounds that lookups draft. They do not depend on the policy of the drafter after them.

    n_drafted, n_accepted, seconds: [A]. n_drafted is 0 if no lookup proposes anything.
    """

    def __init__(
        self, rounds: RoundTable, lookup_proposals: Sequence[LookupProposals], costs: Costs
    ):
        self.n_drafted = np.zeros(len(rounds.max_draft), dtype=int)
        accepted = self.n_drafted.copy()
        for proposals in lookup_proposals:  # the first lookup that proposes anything drafts
            is_free = self.n_drafted == 0
            self.n_drafted = np.where(
                is_free,
                np.clip(proposals.n_proposed, 0, np.maximum(rounds.max_draft, 0)),
                self.n_drafted,
            )
            accepted = np.where(is_free, proposals.accepted_len, accepted)
        self.n_accepted = np.minimum(accepted, self.n_drafted)
        self.seconds = np.array(costs.round_seconds(None, rounds.longest_draft))[self.n_drafted]


def sweep(
    rounds: RoundTable,
    mask: SkipMask,
    policies: Sequence[DraftPolicy],
    costs: Costs,
    lookup_proposals: Sequence[LookupProposals] = (),
) -> np.ndarray:
    """Return predicted decode seconds [policies, prompts].

    lookup_proposals: proposals of the lookups before the skip drafter, in order.
    """
    fixed = _LookupRounds(rounds, lookup_proposals, costs)
    seconds = np.empty((len(policies), len(rounds.prompt_offsets)))
    stops: dict[Exit, np.ndarray] = {}
    for exit_policy in {p.exit for p in policies if not p.exit.shared_across_requests}:
        if (stop_lengths := exit_policy.stop_lengths(rounds.confidence)) is not None:
            stops[exit_policy] = stop_lengths
    memoryless = [i for i, p in enumerate(policies) if p.exit in stops]
    if memoryless:
        for siblings in {policies[i].siblings for i in memoryless}:
            same_siblings = [i for i in memoryless if policies[i].siblings == siblings]
            seconds[same_siblings] = _sweep_memoryless(
                rounds,
                [policies[i] for i in same_siblings],
                stops,
                _SkipRounds(rounds, mask, siblings, costs),
                fixed,
            )
    remaining = [i for i, p in enumerate(policies) if p.exit not in stops]
    for exit_class in {type(policies[i].exit) for i in remaining}:
        batch = [
            i
            for i in remaining
            if type(policies[i].exit) is exit_class
            and not policies[i].exit.shared_across_requests
            and policies[i].siblings is None
        ]
        walkers = (
            exit_class.make_batched(
                [policies[i].exit for i in batch for _ in rounds.prompt_offsets]
            )
            if batch
            else None
        )
        if walkers is not None:
            skip_rounds = _SkipRounds(rounds, mask, None, costs)
            seconds[batch] = _sweep_learning(
                rounds, [policies[i].draft_length for i in batch], walkers, skip_rounds, fixed
            )
            remaining = [i for i in remaining if i not in set(batch)]
    for i in remaining:
        seconds[i] = simulate(rounds, mask, policies[i], costs, lookup_proposals).seconds
    return seconds


def sweep_lookups(
    rounds: RoundTable, options: Sequence[Sequence[LookupProposals]], costs: Costs
) -> np.ndarray:
    """Return predicted decode seconds [options, prompts] of recipes without a skip drafter.

    options: of each, the proposals of its lookups in order.
    """
    fixed = [_LookupRounds(rounds, proposals, costs) for proposals in options]
    return _walk(
        rounds, np.stack([f.n_accepted for f in fixed]), np.stack([f.seconds for f in fixed])
    )


class _SkipRounds:
    """The accepted tokens and seconds of a skip drafter's rounds, with siblings."""

    def __init__(
        self, rounds: RoundTable, mask: SkipMask | None, siblings: Siblings | None, costs: Costs
    ):
        self.accepted_len, self.max_siblings = rounds.accepted_len, siblings.most if siblings else 0
        self.round_seconds = np.array(
            costs.tree_round_seconds(
                mask, rounds.longest_draft, self.max_siblings * rounds.longest_draft
            )
        )  # [siblings + 1, K + 1]
        unsure = rounds.confidence < (siblings.below if siblings else 0)
        self.n_unsure = np.pad(
            unsure.cumsum(axis=1), ((0, 0), (1, 0))
        )  # [A, K + 1]: unsure tokens among the first n draft tokens
        first_wrong = np.pad(unsure, ((0, 0), (0, 1)))[
            np.arange(len(rounds.accepted_len)), rounds.accepted_len
        ]
        self.sibling_accepted = (
            first_wrong
            & (rounds.rank_at_mismatch > 0)
            & (rounds.rank_at_mismatch <= self.max_siblings)
        )  # [A]: whether a sibling is the full model's token at the first mismatch

    def accepted(self, positions: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """Return the accepted tokens [..., R] of R rounds. positions: [R], where the rounds start.

        drafted: tokens that each round drafts, [..., R].
        """
        n_right = self.accepted_len[positions]
        return np.where(n_right < drafted, n_right + self.sibling_accepted[positions], drafted)

    def seconds(self, positions: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        """Return the seconds of rounds; arguments and shapes are as for `accepted`."""
        siblings: np.ndarray = self.max_siblings * self.n_unsure[positions, drafted]
        seconds: np.ndarray = self.round_seconds[siblings, drafted]
        return seconds


def _sweep_memoryless(
    rounds: RoundTable,
    policies: Sequence[DraftPolicy],
    stops: dict[Exit, np.ndarray],
    skip_rounds: _SkipRounds,
    lookup_rounds: _LookupRounds,
) -> np.ndarray:
    most = np.minimum(
        [[min(p.draft_length, rounds.longest_draft)] for p in policies], rounds.max_draft
    )  # [P, A]
    drafted = np.minimum(np.stack([stops[p.exit] for p in policies]), most)
    by_policy = lookup_rounds.n_drafted == 0
    positions = np.arange(len(rounds.accepted_len))
    accepted = np.where(
        by_policy, skip_rounds.accepted(positions, drafted), lookup_rounds.n_accepted
    )
    return _walk(
        rounds,
        accepted,
        np.where(by_policy, skip_rounds.seconds(positions, drafted), lookup_rounds.seconds),
    )


def _walk(rounds: RoundTable, accepted: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Follow each policy from round to round on each prompt; return the total seconds [P, prompts].

    accepted, seconds: the accepted tokens and the seconds of the round of each of P policies that
    starts at each position, [P, A].
    """
    n_policies, n_positions = accepted.shape
    end = np.repeat(rounds.prompt_offsets + rounds.n_positions, rounds.n_positions)
    following = np.arange(n_positions) + accepted + 1
    # A sentinel after the last position: walks end there, at no cost.
    following = np.pad(
        np.where(following < end, following, n_positions),
        ((0, 0), (0, 1)),
        constant_values=n_positions,
    ).ravel()
    spent = np.pad(seconds, ((0, 0), (0, 1))).ravel()
    row = (np.arange(n_policies) * (n_positions + 1))[:, None]
    position = np.broadcast_to(rounds.prompt_offsets, (n_policies, len(rounds.prompt_offsets)))
    total = np.zeros(position.shape)
    while (position < n_positions).any():
        total += spent[row + position]
        position = following[row + position]
    return total


def _sweep_learning(
    rounds: RoundTable,
    lengths: Sequence[int],
    walkers: BatchedExits,
    skip_rounds: _SkipRounds,
    lookup_rounds: _LookupRounds,
) -> np.ndarray:
    """Return the seconds of adaptive policies, [policies, prompts].

    An adaptive policy learns from round to round, so each entry is simulated with a state of its
    own (a walker).
    """
    n_prompts = len(rounds.prompt_offsets)
    length = np.minimum(np.repeat(lengths, n_prompts), rounds.longest_draft)
    position, end = (
        np.tile(rounds.prompt_offsets, len(lengths)),
        np.tile(rounds.prompt_offsets + rounds.n_positions, len(lengths)),
    )
    seconds = np.zeros(len(position))
    walking = np.flatnonzero(position < end)
    while len(walking):
        start = position[walking]
        by_policy = lookup_rounds.n_drafted[start] == 0
        most = np.minimum(length[walking], rounds.max_draft[start])
        drafted = np.where(
            by_policy, np.minimum(walkers.stop_lengths(walking, rounds.confidence[start]), most), 0
        )
        accepted = np.where(
            by_policy, skip_rounds.accepted(start, drafted), lookup_rounds.n_accepted[start]
        )
        seconds[walking] += np.where(
            by_policy, skip_rounds.seconds(start, drafted), lookup_rounds.seconds[start]
        )
        position[walking] = start + accepted + 1
        learns = drafted > 0  # rounds in which the policy drafted
        walkers.observe(walking[learns], accepted[learns], drafted[learns])
        walking = walking[position[walking] < end[walking]]
    return seconds.reshape(len(lengths), n_prompts)


def is_memoryless(policy: DraftPolicy) -> bool:
    """Return whether a policy has no state: its decisions in a round depend on that round alone."""
    return policy.exit.stop_lengths(np.zeros((1, 1))) is not None


def sibling_grid() -> list[Siblings]:
    """Return the sibling settings to try with the best draft policies of a mask."""
    return [
        Siblings(below=below / 10, most=most)
        for below in (2, 3, 4, 5, 6, 7, 8, 9, 10)
        for most in (1, 2, 3)
    ]


def coarse_policies(max_draft: int) -> list[DraftPolicy]:
    """Return the policies with which masks are judged during the search."""
    return _list_policies(
        max_draft, [length for length in COARSE_DRAFT_LENGTHS if length <= max_draft], fine=False
    )


def fine_policies(max_draft: int) -> list[DraftPolicy]:
    """Return the policies for the best masks, with more lengths and finer settings."""
    return _list_policies(max_draft, range(2, max_draft + 1), fine=True)


def _list_policies(max_draft: int, lengths: Sequence[int], fine: bool) -> list[DraftPolicy]:
    """Return each exit policy of the grids with each of its draft lengths.

    If the exit policy reads confidence, the draft lengths are `lengths`. If it is adaptive, they
    are three. Otherwise, they are 1 … max_draft.
    """
    policies = []
    for name in EXITS:
        for exit_policy in resolve_name("exit policy", name, EXITS, SearchError).search_grid(fine):
            learns = not is_memoryless(DraftPolicy(1, exit_policy))
            exit_lengths = (
                {min(n, max_draft) for n in (4, 8, 12)}
                if learns
                else lengths
                if exit_policy.reads_confidence
                else range(1, max_draft + 1)
            )
            policies += [DraftPolicy(length, exit_policy) for length in sorted(exit_lengths)]
    return policies
