"""Replayed positions laid out so that any draft policy can walk them.

After a wrong token, the confidence of the draft is unknown, but decides how much it drafts in vain.
We resample: a random position of the same mask, and the confidences that follow it. After a
mismatch the draft continues a text of its own that is as plausible to it as any other: on the
embedded model 24 % of the confidences there are under 0.4, 29 % of all, but 64 % of those at the
mismatched positions themselves. The draws are the same for every mask and policy, so that
differences between two are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.replay.replay import PromptReplay

MAX_ROUND_DRAFT = 16  # draft tokens that a round is laid out for
_SEED = 0


@dataclass(frozen=True)
class RoundTable:
    """The A positions of N prompts where a round can start, prompt after prompt."""

    accepted_len: np.ndarray  # [A] accepted tokens of an endless draft, at most K
    # [A] tokens that the draft prefers to the full model's at its first error; 0: unknown
    rank_at_mismatch: np.ndarray
    confidence: np.ndarray  # [A, K] the draft's top probability at each of its tokens
    max_draft: np.ndarray  # [A] tokens that may be drafted there
    tokens_left: np.ndarray  # [A] tokens of the text still to come
    prompt_offsets: np.ndarray  # [N] first position of each prompt
    n_positions: np.ndarray  # [N] positions of each prompt
    # Whether `accepted_len` goes beyond the end of the text, which a draft cannot foresee.
    looks_past_end: bool = False
    prompt_indices: tuple[int, ...] = ()  # [N]

    @property
    def longest_draft(self) -> int:
        """K: tokens that a round is laid out for; a longer draft is cut to it."""
        return int(self.confidence.shape[1])


def rounds_from_replay(
    replayed: Sequence[PromptReplay], longest_draft: int = MAX_ROUND_DRAFT
) -> RoundTable:
    """Lay out replayed positions: confidences are real up to the first mismatch, then resampled.

    If the text was sampled, `acceptance` holds probabilities, and one coin is thrown per position.
    """
    random = np.random.default_rng(_SEED)
    accepts = np.concatenate([r.acceptance for r in replayed])
    if accepts.dtype != bool:
        accepts = random.random(len(accepts)) < accepts
    confidence = np.concatenate([r.confidence for r in replayed])
    lengths = np.array([len(r.acceptance) for r in replayed])
    ends = np.cumsum(lengths)
    positions, end = np.arange(len(accepts)), np.repeat(ends, lengths)
    mismatches = np.append(np.flatnonzero(~accepts), len(accepts))
    accepted_len = np.minimum(
        np.minimum(mismatches[np.searchsorted(mismatches, positions)], end) - positions,
        longest_draft,
    )
    drawn = random.integers(len(confidence), size=len(positions))
    steps = np.arange(longest_draft)
    known = (steps <= accepted_len[:, None]) & (positions[:, None] + steps < end[:, None])
    source = np.where(known, positions[:, None] + steps, (drawn[:, None] + steps) % len(confidence))
    max_draft = np.concatenate(
        [r.token_budget - 1 - np.arange(len(r.acceptance)) for r in replayed]
    )
    rank_at_mismatch = np.append(_concatenate_ranks(replayed), 0)[
        np.where(positions + accepted_len < end, positions + accepted_len, len(positions))
    ]
    return RoundTable(
        accepted_len,
        rank_at_mismatch,
        confidence[source],
        max_draft,
        end - positions,
        ends - lengths,
        lengths,
        prompt_indices=tuple(r.prompt_index for r in replayed),
    )


def _concatenate_ranks(replayed: Sequence[PromptReplay]) -> np.ndarray:
    return np.concatenate(
        [np.zeros(len(r.acceptance), dtype=int) if r.ranks is None else r.ranks for r in replayed]
    )


def rounds_without_model(
    continuations: Sequence[Sequence[int]], token_budgets: Sequence[int]
) -> RoundTable:
    """Lay out texts for recipes that draft without a pass of the model.

    continuations: generated tokens. token_budgets: as in `PromptReplay`.
    """
    prompts = tuple(i for i, text in enumerate(continuations) if len(text) > 1)
    lengths = np.array([len(continuations[i]) - 1 for i in prompts])
    ends, places = np.cumsum(lengths), [np.arange(n) for n in lengths]
    tokens_left = np.concatenate([n - at for n, at in zip(lengths, places, strict=True)])
    max_draft = np.concatenate(
        [token_budgets[i] - 1 - at for i, at in zip(prompts, places, strict=True)]
    )
    zeros = np.zeros(len(tokens_left), dtype=int)
    return RoundTable(
        zeros,
        zeros,
        np.zeros((len(tokens_left), MAX_ROUND_DRAFT)),
        max_draft,
        tokens_left,
        ends - lengths,
        lengths,
        prompt_indices=prompts,
    )
