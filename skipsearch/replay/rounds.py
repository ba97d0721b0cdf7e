"""Round tables: replayed positions in a form that any draft policy can be simulated on.

Replay follows a draft only up to its first wrong token. It does not know the confidence of the
tokens after it, which decides how many tokens a round wastes. The missing confidences are therefore
taken from a random position of the same mask. This is a good model, because a draft is about as
confident after a wrong token as elsewhere. On the embedded model, 24 % of the confidences after a
wrong token are below 0.4, and 29 % of all confidences. (At the wrong tokens themselves, 64 % are.)
The random positions are the same for every mask and policy, so they add no noise to comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skipsearch.replay.replay import PromptReplay
from skipsearch.replay.replay_batches import MAX_ROUND_DRAFT

_SEED = 0


@dataclass(frozen=True)
class RoundTable:
    """The positions at which a round can start: A positions of N prompts, prompt after prompt."""

    accepted_len: np.ndarray  # [A] accepted tokens if the draft never ended, at most K
    # [A] rank of the full model's token in the draft at its first wrong token; 0: unknown
    rank_at_mismatch: np.ndarray
    confidence: np.ndarray  # [A, K] the draft's top probability at each of its tokens
    max_draft: np.ndarray  # [A] most tokens that may be drafted
    tokens_left: np.ndarray  # [A] tokens of the text still to come
    prompt_offsets: np.ndarray  # [N] first position of each prompt
    n_positions: np.ndarray  # [N] positions of each prompt
    # Whether `accepted_len` counts tokens beyond the end of the text.
    looks_past_end: bool = False
    prompt_indices: tuple[int, ...] = ()  # [N]

    @classmethod
    def lay_out(
        cls,
        accepted_len: np.ndarray,
        rank_at_mismatch: np.ndarray,
        confidence: np.ndarray,
        prompt_indices: tuple[int, ...],
        n_positions: Sequence[int],
        token_budgets: Sequence[int],
    ) -> RoundTable:
        """Build a table in which a round can start at each generated token but the last.

        n_positions, token_budgets: of each prompt, as in `PromptReplay`.
        """
        lengths = np.array(n_positions, dtype=int)
        first = np.cumsum(lengths) - lengths
        index = np.arange(lengths.sum()) - np.repeat(first, lengths)  # of the position in its text
        return cls(
            accepted_len,
            rank_at_mismatch,
            confidence,
            np.repeat(np.array(token_budgets, dtype=int), lengths) - 1 - index,
            np.repeat(lengths, lengths) - index,
            first,
            lengths,
            prompt_indices=prompt_indices,
        )

    @property
    def longest_draft(self) -> int:
        """K, the most draft tokens of a round. Longer drafts are cut to K."""
        return int(self.confidence.shape[1])


def rounds_from_replay(
    replayed: Sequence[PromptReplay], longest_draft: int = MAX_ROUND_DRAFT
) -> RoundTable:
    """Build the round table of a replay. Confidences after the first mismatch are resampled.

    If the text was sampled, `PromptReplay.acceptance` holds probabilities. At each position,
    acceptance is then drawn with this probability.
    """
    random = np.random.default_rng(_SEED)
    accepts = np.concatenate([r.acceptance for r in replayed])
    if accepts.dtype != bool:
        accepts = random.random(len(accepts)) < accepts
    confidence = np.concatenate([r.confidence for r in replayed])
    lengths = [len(r.acceptance) for r in replayed]
    positions, end = np.arange(len(accepts)), np.repeat(np.cumsum(lengths), lengths)
    mismatches = np.append(np.flatnonzero(~accepts), len(accepts))
    accepted_len = np.minimum(
        np.minimum(mismatches[np.searchsorted(mismatches, positions)], end) - positions,
        longest_draft,
    )
    resampled_from = random.integers(len(confidence), size=len(positions))
    steps = np.arange(longest_draft)
    known = (steps <= accepted_len[:, None]) & (positions[:, None] + steps < end[:, None])
    source = np.where(
        known, positions[:, None] + steps, (resampled_from[:, None] + steps) % len(confidence)
    )
    rank_at_mismatch = np.append(_concatenate_ranks(replayed), 0)[
        np.where(positions + accepted_len < end, positions + accepted_len, len(positions))
    ]
    return RoundTable.lay_out(
        accepted_len,
        rank_at_mismatch,
        confidence[source],
        tuple(r.prompt_index for r in replayed),
        lengths,
        [r.token_budget for r in replayed],
    )


def _concatenate_ranks(replayed: Sequence[PromptReplay]) -> np.ndarray:
    return np.concatenate(
        [np.zeros(len(r.acceptance), dtype=int) if r.ranks is None else r.ranks for r in replayed]
    )


def rounds_without_model(
    continuations: Sequence[Sequence[int]], token_budgets: Sequence[int]
) -> RoundTable:
    """Build the round table of texts, for recipes that draft without a model pass (lookup).

    continuations: generated tokens. token_budgets: as in `PromptReplay`.
    """
    prompts = tuple(i for i, text in enumerate(continuations) if len(text) > 1)
    lengths = [len(continuations[i]) - 1 for i in prompts]
    zeros = np.zeros(sum(lengths), dtype=int)
    return RoundTable.lay_out(
        zeros,
        zeros,
        np.zeros((len(zeros), MAX_ROUND_DRAFT)),
        prompts,
        lengths,
        [token_budgets[i] for i in prompts],
    )
