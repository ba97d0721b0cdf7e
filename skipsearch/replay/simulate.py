"""Simulate the rounds of one recipe, with the counts that real decoding would have.

`sweep` simulates many draft policies at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.core.cost_model import Costs
from skipsearch.core.mask import SkipMask
from skipsearch.core.stats import DecodeStats, DrafterCost, DrafterStats
from skipsearch.decoding.guard import Guard
from skipsearch.drafters.exits import DraftPolicy
from skipsearch.replay.lookup_replay import LookupProposals
from skipsearch.replay.rounds import RoundTable


@dataclass(frozen=True)
class Prediction:
    """Predicted counts and decode times of a recipe."""

    stats: DecodeStats  # of all prompts together
    seconds: np.ndarray  # [segments]
    tokens: np.ndarray  # [segments] tokens of the rounds
    # Of each segment, in the workload; (): unknown
    prompt_indices: tuple[int, ...] = ()

    @property
    def seconds_per_token(self) -> float:
        return float(self.seconds.sum() / self.tokens.sum())

    def extrapolation_factor(self, seen_prompts: Collection[int]) -> float:
        """Return predicted seconds per token on all prompts, divided by those on the prompts seen.

        The factor times the seconds per token measured on the prompts seen estimates the seconds
        per token on all prompts. Returns 1 if one of the prompts seen was not predicted.
        """
        rows = [row for row, prompt in enumerate(self.prompt_indices) if prompt in seen_prompts]
        if not rows or not set(seen_prompts) <= set(self.prompt_indices):
            return 1.0
        seen = float(self.seconds[rows].sum() / self.tokens[rows].sum())
        return self.seconds_per_token / seen

    @property
    def stderr(self) -> float:
        """The standard error of `seconds_per_token` over prompts, by the delta method."""
        n = len(self.tokens)
        if n < 2:
            return 0.0
        residuals = self.seconds - self.seconds_per_token * self.tokens
        return float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / self.tokens.sum())


@dataclass(frozen=True)
class SimulatedRound:
    """One round of a simulation."""

    drafter_index: int  # position of the drafter in the recipe
    n_drafted: int  # draft tokens; 0: no drafter proposed any
    n_siblings: int = 0  # further tokens that were verified
    position: int = 0  # at which it starts, in the round table


def simulate_rounds(
    rounds: RoundTable,
    policy: DraftPolicy | None,
    lookup_proposals: Sequence[LookupProposals] = (),
    drafter_costs: Sequence[DrafterCost | None] = (),
) -> tuple[DecodeStats, list[list[SimulatedRound]]]:
    """Return the counts of all rounds, and the rounds of each prompt.

    policy: the draft policy of the skip drafter, which is the last drafter of the recipe; None: the
    recipe has no skip drafter.
    lookup_proposals: proposals of the lookups before the skip drafter, in order.
    drafter_costs: each drafter's costs for the guard, which pauses drafters in the same rounds as
    in decoding; (): no guard.
    Source: Draft & Verify, algorithms 3 and 4.
    """
    accepted_len, ranks, confidence = (
        rounds.accepted_len.tolist(),
        rounds.rank_at_mismatch.tolist(),
        rounds.confidence.tolist(),
    )
    max_draft, tokens_left = rounds.max_draft.tolist(), rounds.tokens_left.tolist()
    lookups = [(c.n_proposed.tolist(), c.accepted_len.tolist()) for c in lookup_proposals]
    stats, rounds_by_prompt = (
        DecodeStats(
            by_drafter=[DrafterStats() for _ in range(len(lookup_proposals) + (policy is not None))]
        ),
        [],
    )
    session = policy.exit.begin() if policy else None
    for first, length in zip(
        rounds.prompt_offsets.tolist(), rounds.n_positions.tolist(), strict=True
    ):
        position, prompt_rounds, guard = (
            first,
            [],
            Guard(drafter_costs) if any(drafter_costs) else None,
        )
        if policy and not policy.exit.shared_across_requests:
            session = policy.exit.begin()
        while position < first + length:
            drafter = next(
                (
                    i
                    for i, (n_proposed, _) in enumerate(lookups)
                    if n_proposed[position] > 0
                    and max_draft[position] > 0
                    and not (guard and guard.is_paused(i))
                ),
                len(lookups),
            )
            drafted, n_right, siblings, sibling_accepted = 0, accepted_len[position], 0, False
            if drafter < len(lookups):
                drafted, n_right = (
                    min(lookups[drafter][0][position], max_draft[position]),
                    lookups[drafter][1][position],
                )
            elif policy and session and not (guard and guard.is_paused(drafter)):
                limit = min(policy.draft_length, max_draft[position], rounds.longest_draft)
                while drafted < limit:
                    top_probability = confidence[position][drafted]
                    drafted += 1
                    if (
                        drafted < limit
                        and policy.exit.reads_confidence
                        and session.should_stop(top_probability, drafted)
                    ):
                        break
                if drafted:
                    session.observe(min(n_right, drafted), drafted)
                if policy.siblings:
                    unsure = [c < policy.siblings.below for c in confidence[position][:drafted]]
                    siblings = sum(unsure) * policy.siblings.most
                    sibling_accepted = (
                        n_right < drafted
                        and unsure[n_right]
                        and 0 < ranks[position] <= policy.siblings.most
                    )
            accepted = n_right + 1 if sibling_accepted else min(n_right, drafted)
            rejected = (
                n_right < drafted
                and not sibling_accepted
                and (rounds.looks_past_end or accepted < tokens_left[position])
            )
            if drafted:
                stats.by_drafter[drafter].add_round(
                    drafted, accepted, rejected, n_siblings=siblings
                )
            if guard:
                guard.record_round(drafter if drafted else None, drafted, accepted, siblings)
            prompt_rounds.append(SimulatedRound(drafter, drafted, siblings, position))
            stats.rounds += 1
            stats.drafted += drafted
            stats.accepted += accepted
            stats.rejecting_rounds += rejected
            position += accepted + 1
        stats.round_tokens += length
        rounds_by_prompt.append(prompt_rounds)
    stats.tokens = stats.round_tokens + len(rounds_by_prompt)
    return stats, rounds_by_prompt


def simulate(
    rounds: RoundTable,
    mask: SkipMask | None,
    policy: DraftPolicy | None,
    costs: Costs,
    lookup_proposals: Sequence[LookupProposals] = (),
    drafter_costs: Sequence[DrafterCost | None] = (),
) -> Prediction:
    """Predict the decode time of a recipe.

    mask: the mask of the skip drafter. Other arguments are as for `simulate_rounds`.
    """
    stats, drafts = simulate_rounds(rounds, policy, lookup_proposals, drafter_costs)
    most = policy.draft_length * policy.siblings.most if policy and policy.siblings else 0
    cost = [
        *([costs.tree_round_seconds(None, rounds.longest_draft, 0)] * len(lookup_proposals)),
        costs.tree_round_seconds(mask, rounds.longest_draft, most),
    ]

    def round_seconds(r: SimulatedRound) -> float:
        return cost[r.drafter_index][r.n_siblings][r.n_drafted]

    seconds = [sum(map(round_seconds, of_prompt)) for of_prompt in drafts]
    stats.decode_seconds = float(sum(seconds))
    for of_prompt in drafts:
        for r in of_prompt:
            if r.n_drafted:
                drafting = (
                    costs.draft_seconds(mask, r.n_drafted)
                    if mask is not None and r.drafter_index == len(lookup_proposals)
                    else 0.0
                )
                stats.by_drafter[r.drafter_index].draft_seconds += drafting
                stats.by_drafter[r.drafter_index].verify_seconds += round_seconds(r) - drafting
    return Prediction(stats, np.array(seconds), rounds.n_positions, rounds.prompt_indices)


def compute_drafter_costs(stats: DecodeStats, plain_pass_s: float) -> list[DrafterCost | None]:
    """Return cost and gain of each drafter's rounds. plain_pass_s: seconds of a plain pass."""
    return [
        DrafterCost.from_counts(
            d.rounds,
            d.drafted,
            d.accepted,
            d.draft_seconds / max(1, d.drafted) / plain_pass_s,
            d.verify_seconds / max(1, d.rounds) / plain_pass_s,
            d.siblings,
        )
        for d in stats.by_drafter
    ]
