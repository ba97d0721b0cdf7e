"""Replay `lookup`. Its proposals depend on the text alone, so replay equals decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from skipsearch.core.sequences import common_prefix_length
from skipsearch.drafters.lookup.spec import Lookup
from skipsearch.drafters.lookup.suffix_index import SuffixIndex
from skipsearch.replay.rounds import MAX_ROUND_DRAFT

MIN_MATCHES = (1, 2, 3, 4, 6, 8)
COPY_LENGTHS = (2, 3, 4, 6, 8, 12)
COPIES_PER_MATCH = (None, 1, 2, 3)


@dataclass(frozen=True)
class LookupProposals:
    """The proposals of `lookup` with one setting, at a number of positions (A)."""

    n_proposed: np.ndarray  # [A] tokens; 0: no match
    accepted_len: np.ndarray  # [A] accepted tokens if the proposal never ended


class LookupReplay:
    """A replay of `lookup` that finds the longest match at every position of every text.

    prompt_ids, continuations: token ids. A round may start at each generated token but the last.
    known_texts: longer continuations, from which acceptance beyond the generated tokens is known.
    """

    def __init__(
        self,
        prompt_ids: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        known_texts: Sequence[Sequence[int]] | None = None,
    ):
        self._match_lengths: list[np.ndarray] = []
        self._accepted_len: list[np.ndarray] = []
        for i, (prompt, text) in enumerate(zip(prompt_ids, continuations, strict=True)):
            matched, accepted = _match_positions(prompt, text, (known_texts or continuations)[i])
            self._match_lengths.append(matched)
            self._accepted_len.append(accepted)

    def __call__(self, spec: Lookup, prompt_indices: Sequence[int]) -> LookupProposals:
        """Return the proposals of one setting at the positions of these prompts, in order."""
        matched = self.match_lengths(prompt_indices)
        offered = np.array(
            [spec.max_copy(length) for length in range(int(matched.max(initial=0)) + 1)]
        )[matched]
        return LookupProposals(
            np.minimum(offered, MAX_ROUND_DRAFT),
            np.concatenate([self._accepted_len[p] for p in prompt_indices]),
        )

    def match_lengths(self, prompt_indices: Sequence[int]) -> np.ndarray:
        """Return the length of the match at each position of these prompts, [A]; 0: none."""
        return np.concatenate([self._match_lengths[p] for p in prompt_indices])


def _match_positions(
    prompt: Sequence[int], text: Sequence[int], known_text: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (match lengths, accepted tokens of proposals of MAX_ROUND_DRAFT tokens), both [A]."""
    index, count = SuffixIndex(), max(0, len(text) - 1)
    index.extend(prompt)
    matched, accepted = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
    for position in range(count):
        index.extend(text[position : position + 1])
        match = index.longest_match()
        if match is not None:
            proposed = index.continuation(match.position, MAX_ROUND_DRAFT)
            following = known_text[position + 1 : position + 1 + MAX_ROUND_DRAFT]
            matched[position] = match.length
            accepted[position] = common_prefix_length(proposed, following)
    return matched, accepted


def lookup_grid(max_draft: int) -> list[Lookup]:
    """Return the settings of `lookup` that a search tries. max_draft: most tokens of a draft."""
    return [
        Lookup(min_match=least, draft_length=length, per_match=per)
        for least, length, per in product(MIN_MATCHES, COPY_LENGTHS, COPIES_PER_MATCH)
        if length <= max_draft and (per is None or per < length)
    ]
