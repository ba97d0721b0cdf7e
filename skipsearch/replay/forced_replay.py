"""Replay the tokens that a constraint forces. They depend on the text alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skipsearch.constraints import CompiledConstraint
from skipsearch.core.sequences import common_prefix_length
from skipsearch.replay.lookup_replay import LookupProposals
from skipsearch.replay.rounds import MAX_ROUND_DRAFT
from skipsearch.replay.segments import Segment


class ForcedReplay:
    """The forced tokens at every position of every segment.

    In decoding, a drafter may continue forced tokens in the same round. This replay counts the
    forced tokens alone, so it predicts a few rounds too many.
    """

    def __init__(
        self,
        constraint: CompiledConstraint,
        texts: Sequence[Sequence[int]],
        segments: Sequence[Segment],
    ):
        """Count the forced tokens. texts: whole continuations, to which `segments` refer."""
        of_texts = [_count_forced(constraint, text) for text in texts]
        self._counts = [
            tuple(counts[s.first : s.end] for counts in of_texts[s.text]) for s in segments
        ]

    def __call__(self, prompt_indices: Sequence[int]) -> LookupProposals:
        """Return the forced tokens at the positions of these prompts, in order."""
        counts = [self._counts[p] for p in prompt_indices]
        return LookupProposals(
            np.concatenate([proposed for proposed, _ in counts]),
            np.concatenate([accepted for _, accepted in counts]),
        )


def _count_forced(
    constraint: CompiledConstraint, text: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (forced tokens, those that the text has), both [A], at the positions of a text."""
    matcher, n_positions = constraint.new_matcher(), max(0, len(text) - 1)
    proposed, accepted = np.zeros(n_positions, dtype=int), np.zeros(n_positions, dtype=int)
    for position in range(n_positions):
        matcher.advance([text[position]])
        forced = matcher.forced_tokens()[:MAX_ROUND_DRAFT]
        following = text[position + 1 : position + 1 + len(forced)]
        proposed[position] = len(forced)
        accepted[position] = common_prefix_length(forced, following)
    return proposed, accepted
