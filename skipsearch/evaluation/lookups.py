"""What `lookup` would propose wherever a round can start. It follows from the text alone, so its rounds are exact in replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from skipsearch.drafters.lookup import Lookup
from skipsearch.drafters.suffixes import SuffixIndex
from skipsearch.evaluation.rounds import LONGEST

LEAST_MATCHES = (1, 2, 3, 4, 6, 8)
LENGTHS = (2, 3, 4, 6, 8, 12)
PER_MATCH = (None, 1, 2, 3)


@dataclass(frozen=True)
class Copied:
    """One setting of lookup at the anchors of some prompts. offered [A]: tokens that it proposes there, 0 where it says nothing; right [A]:
    how many tokens of an endless proposal the full model would accept."""

    offered: np.ndarray
    right: np.ndarray


class Lookups:
    """Matches at every anchor of every text. prompts, texts: token ids; a text has an anchor at each of its tokens but the last, or, where
    more of it is `known` than was generated, at as many tokens as were generated but one."""

    def __init__(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], known: Sequence[Sequence[int]] | None = None):
        self._matched: list[np.ndarray] = []
        self._right: list[np.ndarray] = []
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            matched, right = _anchors(prompt, text, (known or texts)[i])
            self._matched.append(matched)
            self._right.append(right)

    def __call__(self, spec: Lookup, prompts: Sequence[int]) -> Copied:
        """One setting at the anchors of these prompts, in their order."""
        matched = self.matched(prompts)
        offered = np.array([spec.room(length) for length in range(int(matched.max(initial=0)) + 1)])[matched]
        return Copied(np.minimum(offered, LONGEST), np.concatenate([self._right[p] for p in prompts]))

    def matched(self, prompts: Sequence[int]) -> np.ndarray:
        """[A]: tokens that match at the anchors of these prompts, 0 where none does."""
        return np.concatenate([self._matched[p] for p in prompts])


def _anchors(prompt: Sequence[int], text: Sequence[int], known: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """([A] length of the match, 0 if none, [A] proposed tokens that the text goes on with, at most LONGEST)."""
    index, count = SuffixIndex(), max(0, len(text) - 1)
    index.extend(prompt)
    matched, right = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
    for at in range(count):
        index.extend(text[at:at + 1])
        match = index.match()
        if match is not None:
            proposed, following = index.follow(match.position, LONGEST), known[at + 1:at + 1 + LONGEST]
            matched[at] = match.length
            right[at] = next((n for n, (a, b) in enumerate(zip(proposed, following, strict=False)) if a != b), min(LONGEST, len(following)))
    return matched, right


def grid(max_draft: int) -> list[Lookup]:
    """The settings that a search tries."""
    return [Lookup(min_match=least, draft_length=length, per_match=per)
            for least, length, per in product(LEAST_MATCHES, LENGTHS, PER_MATCH) if length <= max_draft and (per is None or per < length)]
